"""The forms in which a gradient can travel, each a mean over the ranks of what they sent.

A format is given a flat gradient and gives two back: the mean over all ranks of what was sent,
equal to the bit on all of them, and what this rank itself sent. The difference between that and
the gradient is what error feedback sends later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.compress import sparse
from paceline.compress.packing import (
    pack_positions,
    packed_positions_size,
    unpack_positions,
)
from paceline.compress.wire import Wire

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Turn:
    """When and where an exchange takes place: what seeded formats draw from."""

    step: int
    slot: int


class Format(Protocol):
    """One form."""

    @property
    def feedback(self) -> bool:
        """Whether what is left behind has to be sent later for training to converge."""

    def mean(self, values: Tensor, wire: Wire, turn: Turn) -> tuple[Tensor, Tensor]:
        """The mean of what all ranks sent of their ``values``, and what this one sent."""


@dataclass(frozen=True)
class Plain:
    """As it is."""

    feedback = False

    def mean(self, values: Tensor, wire: Wire, turn: Turn) -> tuple[Tensor, Tensor]:
        """Everything was sent."""
        return wire.sum(values.clone()).div_(wire.size), values


@dataclass(frozen=True)
class Cast:
    """In 16 bits."""

    dtype: torch.dtype
    feedback = False

    def mean(self, values: Tensor, wire: Wire, turn: Turn) -> tuple[Tensor, Tensor]:
        """Divided before it is added up: a sum of large gradients may be too large for fp16."""
        sent = (values / wire.size).to(self.dtype)
        own = sent.to(values.dtype).mul_(wire.size)
        return wire.sum(sent).to(values.dtype), own


@dataclass(frozen=True)
class Largest:
    """The largest elements, by size: where they are and what they are."""

    ratio: float
    dtype: torch.dtype | None = None
    feedback = True

    def mean(self, values: Tensor, wire: Wire, turn: Turn) -> tuple[Tensor, Tensor]:
        """Positions and numbers in one message; every rank adds up all of them, in rank order."""
        size = values.numel()
        count = sparse.how_many(size, self.ratio)
        positions = sparse.largest(values, count)
        chosen = values[positions].to(self.dtype or values.dtype)
        head = packed_positions_size(count, size)
        packed = torch.cat([pack_positions(positions, size), chosen.view(torch.uint8)])
        mean = torch.zeros_like(values)
        for message in wire.gather(packed):
            numbers = message[head:].clone().view(chosen.dtype).to(values.dtype)
            mean.index_add_(0, unpack_positions(message[:head].clone(), count, size), numbers)
        sent = torch.zeros_like(values)
        sent[positions] = chosen.to(values.dtype)
        return mean.div_(wire.size), sent


@dataclass(frozen=True)
class Drawn:
    """Elements drawn by a seed that all ranks share: no positions travel, and sums do."""

    ratio: float
    seed: int = 0
    dtype: torch.dtype | None = None
    feedback = True

    def mean(self, values: Tensor, wire: Wire, turn: Turn) -> tuple[Tensor, Tensor]:
        """The same positions on every rank, others at every step."""
        count = sparse.how_many(values.numel(), self.ratio)
        seed = hash((self.seed, turn.step, turn.slot)) & (2**63 - 1)
        positions = sparse.drawn(values.numel(), count, seed, values.device)
        form: Format = Plain() if self.dtype is None else Cast(self.dtype)
        some, own = form.mean(values[positions], wire, turn)
        mean, sent = torch.zeros_like(values), torch.zeros_like(values)
        mean[positions], sent[positions] = some, own
        return mean, sent
