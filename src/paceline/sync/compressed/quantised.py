"""Gradients as small integers or signs, on any number of ranks.

Two ranks swap what they have. More would each send everything to everyone: instead every rank adds
up one stretch of the gradient, and sends the sum on in the same form. What that second rounding
loses stays with the rank that did it, and is part of its next sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.sync.compressed import quantise
from paceline.sync.compressed.formats import Sent, Trip, Turn

Pack = Callable[[Tensor], Tensor]
Unpack = Callable[[Tensor, int, torch.dtype], Tensor]


@dataclass(frozen=True)
class Quantised:
    """Each block of numbers with a scale of its own.

    ``in_stretches`` is off where what one rank keeps of a sum could not be saved for another
    layout to load: then everything goes to everyone.
    """

    block: int
    to_bytes: Pack
    from_bytes: Unpack
    in_stretches: bool = True
    feedback = True

    def mean(self, values: Tensor, trip: Trip) -> Sent:
        """See the module."""
        wire = trip.wire
        if wire.size == 2 or not self.in_stretches:
            return self._from_everyone(values, trip)
        count, dtype = values.numel(), values.dtype
        length = self.stretch(count, wire.size)
        stretches = _padded(values, length * wire.size).chunk(wire.size)
        packed = [self.to_bytes(part) for part in stretches]
        own = None
        if trip.wants_own:
            own = torch.cat([self.from_bytes(part, length, dtype) for part in packed])[:count]
        total = torch.zeros_like(stretches[0])
        for message in wire.swap(packed):
            total += self.from_bytes(message, length, dtype)
        total.div_(wire.size)
        if trip.kept is not None:
            total += trip.kept
        total[max(count - wire.rank * length, 0) :] = 0  # signs of the padding
        rounded = self.to_bytes(total)
        left = total - self.from_bytes(rounded, length, dtype)
        mean = torch.cat([self.from_bytes(m, length, dtype) for m in wire.gather(rounded)])
        return Sent(mean[:count], own, left)

    def stretch(self, count: int, ranks: int) -> int:
        """How many of ``count`` elements each rank adds up: whole blocks, the last ones padding."""
        return -(-quantise.blocks_of(count, self.block) // ranks) * self.block

    def _from_everyone(self, values: Tensor, trip: Trip) -> Sent:
        messages = trip.wire.gather(self.to_bytes(values))
        parts = [self.from_bytes(m, values.numel(), values.dtype) for m in messages]
        mean = parts[0] + parts[1]
        for part in parts[2:]:
            mean += part
        own = parts[trip.wire.rank] if trip.wants_own else None
        return Sent(mean.div_(trip.wire.size), own)

    def pack(self, values: Tensor, turn: Turn) -> Tensor:
        """Scales, then integers."""
        return self.to_bytes(values)

    def unpack(self, packed: Tensor, count: int, dtype: torch.dtype, turn: Turn) -> Tensor:
        """Integers times scales."""
        return self.from_bytes(packed, count, dtype)


def _padded(values: Tensor, length: int) -> Tensor:
    missing = length - values.numel()
    return torch.cat([values, values.new_zeros(missing)]) if missing else values


def int8(*, in_stretches: bool = True) -> Quantised:
    """Eight bits an element."""

    def pack(values: Tensor) -> Tensor:
        codes, scales = quantise.to_int8(values)
        return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)])

    def unpack(packed: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        head = 4 * quantise.blocks_of(count, quantise.INT8_BLOCK)
        scales = packed[:head].clone().view(torch.float32)
        return quantise.from_int8(packed[head:].view(torch.int8), scales, dtype)

    return Quantised(quantise.INT8_BLOCK, pack, unpack, in_stretches)


def signs(*, in_stretches: bool = True) -> Quantised:
    """One bit an element."""

    def pack(values: Tensor) -> Tensor:
        packed, scales = quantise.to_signs(values)
        return torch.cat([scales.view(torch.uint8), packed])

    def unpack(packed: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        head = 4 * quantise.blocks_of(count, quantise.SIGN_BLOCK)
        scales = packed[:head].clone().view(torch.float32)
        return quantise.from_signs(packed[head:], scales, count, dtype)

    return Quantised(quantise.SIGN_BLOCK, pack, unpack, in_stretches)
