"""The forms in which a gradient can travel, each a mean over the ranks of what they sent.

A format is given a flat gradient and tells three things: the mean over all ranks of what was sent,
bitwise-identical on all of them; what this rank itself sent, whose difference to the gradient is
the residual that error feedback sends later; and, where sums are rounded on their way, what that
lost here.

Formats remember nothing: what a later step needs is handed back, and given again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.sync.wire import Wire

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
        """Whether the residual has to be sent later for training to converge."""

    def mean(self, values: Tensor, trip: Trip) -> Sent:
        """The mean over the ranks of ``values``, in this form. A collective."""

    def pack(self, values: Tensor, turn: Turn) -> Tensor:
        """``values`` as bytes; as many for as many values on every rank."""

    def unpack(self, packed: Tensor, count: int, dtype: torch.dtype, turn: Turn) -> Tensor:
        """What ``pack`` made of ``count`` values, as numbers again."""


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


def as_bytes(values: Tensor) -> Tensor:
    """The memory of ``values`` (flat)."""
    return values.contiguous().view(torch.uint8)


def from_bytes(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers in ``packed``; copied, since bytes in the middle of others may lie anywhere."""
    return packed.clone().view(dtype)
