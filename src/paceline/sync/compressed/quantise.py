"""Gradients as small integers or signs (int8, sign), with a scale for each block of numbers.

Two ranks swap what they have. More would each send everything to everyone: instead every rank adds
up one stretch of the gradient, and sends the sum on in the same form. What that second rounding
loses stays with the rank that did it, and is part of its next sum.

Rounding is to the nearest: with error feedback what is lost is sent later, so that no dither is
needed, and the same numbers always make the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.sync.compressed.formats import Sent, Trip, Turn
from paceline.sync.compressed.packing import pack_signs, unpack_signs

INT8_BLOCK = 1024
SIGN_BLOCK = 128
"""Smaller: a sign says nothing of a number's size, so that its scale has to fit all the better."""
_LEVEL = 1 / 127
"""Of the largest number. Multiplied with: CUDA divides by a constant otherwise than a CPU does."""


def blocks_of(size: int, block: int) -> int:
    """How many blocks, each with a scale of its own, ``size`` numbers make."""
    return -(-size // block)


def to_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """``values`` (flat) as int8, and a float32 scale for every block."""
    padded = _padded(values, INT8_BLOCK).view(-1, INT8_BLOCK)
    least, most = padded.aminmax(dim=1)
    scales = torch.maximum(most, -least).to(torch.float32) * _LEVEL
    steps = torch.where(scales > 0, scales, 1.0).unsqueeze(1)
    codes = (padded / steps.to(padded.dtype)).round_().to(torch.int8)
    return codes.view(-1)[: values.numel()], scales


def from_int8(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that ``to_int8`` gave, as near as it kept them."""
    padded = _padded(codes, INT8_BLOCK).view(-1, INT8_BLOCK).to(dtype)
    return padded.mul_(scales.to(dtype).unsqueeze(1)).view(-1)[: codes.numel()]


def to_signs(values: Tensor) -> tuple[Tensor, Tensor]:
    """The packed signs of ``values`` (flat), and the mean size of each block as float32."""
    padded = _padded(values, SIGN_BLOCK).view(-1, SIGN_BLOCK)
    scales = padded.abs().sum(1).to(torch.float32)
    counts = torch.full_like(scales, SIGN_BLOCK)
    if (rest := values.numel() % SIGN_BLOCK) != 0:
        counts[-1] = rest
    return pack_signs(values), scales / counts


def from_signs(packed: Tensor, scales: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Each sign times the mean size of its block."""
    signs = _padded(unpack_signs(packed, count, dtype), SIGN_BLOCK).view(-1, SIGN_BLOCK)
    return signs.mul_(scales.to(dtype).unsqueeze(1)).view(-1)[:count]


def _padded(values: Tensor, block: int) -> Tensor:
    missing = -values.numel() % block
    return torch.cat([values, values.new_zeros(missing)]) if missing else values


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
        stretches = _padded_to(values, length * wire.size).chunk(wire.size)
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
        return -(-blocks_of(count, self.block) // ranks) * self.block

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


def _padded_to(values: Tensor, length: int) -> Tensor:
    missing = length - values.numel()
    return torch.cat([values, values.new_zeros(missing)]) if missing else values


def int8(*, in_stretches: bool = True) -> Quantised:
    """Eight bits an element."""

    def pack(values: Tensor) -> Tensor:
        codes, scales = to_int8(values)
        return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)])

    def unpack(packed: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        head = 4 * blocks_of(count, INT8_BLOCK)
        scales = packed[:head].clone().view(torch.float32)
        return from_int8(packed[head:].view(torch.int8), scales, dtype)

    return Quantised(INT8_BLOCK, pack, unpack, in_stretches)


def signs(*, in_stretches: bool = True) -> Quantised:
    """One bit an element."""

    def pack(values: Tensor) -> Tensor:
        packed, scales = to_signs(values)
        return torch.cat([scales.view(torch.uint8), packed])

    def unpack(packed: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        head = 4 * blocks_of(count, SIGN_BLOCK)
        scales = packed[:head].clone().view(torch.float32)
        return from_signs(packed[head:], scales, count, dtype)

    return Quantised(SIGN_BLOCK, pack, unpack, in_stretches)
