"""The forms in which a gradient can travel, each a mean over the ranks of what they sent.

A format is given a flat gradient and tells three things: the mean over all ranks of what was sent,
equal to the bit on all of them; what this rank itself sent, whose difference to the gradient is
what error feedback sends later; and, where sums are rounded on their way, what that lost here.

Formats remember nothing: what a later step needs is handed back, and given again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.sync.compressed import topk as sparse
from paceline.sync.compressed.packing import (
    pack_positions,
    packed_positions_size,
    unpack_positions,
)
from paceline.sync.wire import Wire

_MIX = 1_000_003
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Turn(NamedTuple):
    """When and where an exchange takes place: what seeded formats draw from."""

    step: int
    slot: int


class Trip(NamedTuple):
    """By which wire, when, and with what an exchange takes place."""

    wire: Wire
    turn: Turn
    kept: Tensor | None = None
    """What rounding the last such sum lost on this rank."""
    wants_own: bool = True
    """Whether somebody will look at what this rank itself sent, and at the values given."""


class Sent(NamedTuple):
    """What came of an exchange."""

    mean: Tensor
    own: Tensor | None
    """What this rank itself sent, where that was wanted."""
    kept: Tensor | None = None
    """What rounding a sum lost on this rank, which is to be added to the next such sum."""


class Format(Protocol):
    """One form."""

    @property
    def feedback(self) -> bool:
        """Whether what is left behind has to be sent later for training to converge."""

    def mean(self, values: Tensor, trip: Trip) -> Sent:
        """The mean over the ranks of ``values``, in this form. A collective."""

    def pack(self, values: Tensor, turn: Turn) -> Tensor:
        """``values`` as bytes; as many for as many values on every rank."""

    def unpack(self, packed: Tensor, count: int, dtype: torch.dtype, turn: Turn) -> Tensor:
        """What :meth:`pack` made of ``count`` values, as numbers again."""


@dataclass(frozen=True)
class Plain:
    """As it is."""

    feedback = False

    def mean(self, values: Tensor, trip: Trip) -> Sent:
        """Everything was sent."""
        if not trip.wants_own:
            return Sent(trip.wire.sum(values).div_(trip.wire.size), None)
        return Sent(trip.wire.sum(values.clone()).div_(trip.wire.size), values)

    def pack(self, values: Tensor, turn: Turn) -> Tensor:
        """Their own bytes."""
        return as_bytes(values)

    def unpack(self, packed: Tensor, count: int, dtype: torch.dtype, turn: Turn) -> Tensor:
        """Their own bytes."""
        return from_bytes(packed, dtype)


@dataclass(frozen=True)
class Cast:
    """In 16 bits."""

    dtype: torch.dtype
    feedback = False

    def mean(self, values: Tensor, trip: Trip) -> Sent:
        """Divided before it is added up: a sum of large gradients may be too large for fp16."""
        size = trip.wire.size
        sent = (values / size).to(self.dtype)
        own = sent.to(values.dtype).mul_(size) if trip.wants_own else None
        return Sent(trip.wire.sum(sent).to(values.dtype), own)

    def pack(self, values: Tensor, turn: Turn) -> Tensor:
        """Two bytes each."""
        return as_bytes(values.to(self.dtype))

    def unpack(self, packed: Tensor, count: int, dtype: torch.dtype, turn: Turn) -> Tensor:
        """Back to ``dtype``."""
        return from_bytes(packed, self.dtype).to(dtype)


@dataclass(frozen=True)
class Largest:
    """The largest elements, by size: where they are and what they are."""

    ratio: float
    dtype: torch.dtype | None = None
    feedback = True

    def mean(self, values: Tensor, trip: Trip) -> Sent:
        """Positions and numbers in one message; every rank adds up all of them, in rank order."""
        size = values.numel()
        mean = torch.zeros_like(values)
        own = None
        for rank, message in enumerate(trip.wire.gather(self.pack(values, trip.turn))):
            positions, numbers = self._read(message, size, values.dtype)
            mean.index_add_(0, positions, numbers)
            if rank == trip.wire.rank and trip.wants_own:
                own = torch.zeros_like(values).index_copy_(0, positions, numbers)
        return Sent(mean.div_(trip.wire.size), own)

    def pack(self, values: Tensor, turn: Turn) -> Tensor:
        """First where they are."""
        size = values.numel()
        positions = sparse.largest(values, sparse.how_many(size, self.ratio))
        chosen = values[positions].to(self.dtype or values.dtype)
        return torch.cat([pack_positions(positions, size), as_bytes(chosen)])

    def unpack(self, packed: Tensor, count: int, dtype: torch.dtype, turn: Turn) -> Tensor:
        """Zeros where nothing was sent."""
        positions, numbers = self._read(packed, count, dtype)
        return numbers.new_zeros(count).index_copy_(0, positions, numbers)

    def _read(self, packed: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        count = sparse.how_many(size, self.ratio)
        head = packed_positions_size(count, size)
        numbers = from_bytes(packed[head:], self.dtype or dtype).to(dtype)
        return unpack_positions(packed[:head].clone(), count, size), numbers


@dataclass(frozen=True)
class Drawn:
    """Elements drawn by a seed that all ranks share: no positions travel, and sums do."""

    ratio: float
    seed: int = 0
    dtype: torch.dtype | None = None
    feedback = True

    def mean(self, values: Tensor, trip: Trip) -> Sent:
        """The same positions on every rank, others at every step."""
        positions = self._positions(values.numel(), trip.turn, values.device)
        sent = self._numbers.mean(self._chosen(values, positions), trip)
        mean = torch.zeros_like(values).index_copy_(0, positions, sent.mean)
        own = None
        if sent.own is not None:
            own = torch.zeros_like(values).index_copy_(0, positions, sent.own)
        return Sent(mean, own)

    def pack(self, values: Tensor, turn: Turn) -> Tensor:
        """The numbers alone."""
        positions = self._positions(values.numel(), turn, values.device)
        return self._numbers.pack(self._chosen(values, positions), turn)

    def unpack(self, packed: Tensor, count: int, dtype: torch.dtype, turn: Turn) -> Tensor:
        """Zeros where nothing was drawn."""
        positions = self._positions(count, turn, packed.device)
        numbers = self._numbers.unpack(packed, len(positions), dtype, turn)
        return numbers.new_zeros(count).index_copy_(0, positions, numbers)

    @property
    def _numbers(self) -> Plain | Cast:
        return Plain() if self.dtype is None else Cast(self.dtype)

    def _positions(self, size: int, turn: Turn, device: torch.device) -> Tensor:
        seed = ((self.seed * _MIX + turn.step) * _MIX + turn.slot) % 2**63
        return sparse.drawn(size, sparse.how_many(size, self.ratio), seed, device)

    @staticmethod
    def _chosen(values: Tensor, positions: Tensor) -> Tensor:
        """Those drawn; one of them tells of a number elsewhere that is not finite."""
        chosen = values[positions]
        chosen[0] += values.abs().amax() * 0
        return chosen


def as_bytes(values: Tensor) -> Tensor:
    """The memory of ``values`` (flat)."""
    return values.contiguous().view(torch.uint8)


def from_bytes(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers in ``packed``; copied, since bytes in the middle of others may lie anywhere."""
    return packed.clone().view(dtype)
