"""Gradients as small integers or signs, on any number of ranks.

Two ranks swap what they have. More would each send everything to everyone: instead every rank adds
up one stretch of the gradient, and sends the sum on in the same form. What that second rounding
loses stays with the rank that did it, and is part of its next sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.compress import quantise
from paceline.compress.formats import Turn
from paceline.compress.wire import Wire

Pack = Callable[[Tensor], Tensor]
Unpack = Callable[[Tensor, int, torch.dtype], Tensor]


@dataclass
class Quantised:
    """Each block of numbers with a scale of its own; ``pack`` and ``unpack`` say in what form."""

    pack: Pack
    unpack: Unpack
    kept: dict[int, Tensor] = field(default_factory=dict)
    """What the rounding of sums lost, by slot: on the rank that rounded."""
    feedback = True

    def mean(self, values: Tensor, wire: Wire, turn: Turn) -> tuple[Tensor, Tensor]:
        """See the module."""
        if wire.size == 2:
            packed = self.pack(values)
            parts = [self.unpack(m, values.numel(), values.dtype) for m in wire.gather(packed)]
            return (parts[0] + parts[1]).div_(2), parts[wire.rank]
        stretches = _stretches(values, wire.size)
        length = stretches[0].numel()
        packed_all = [self.pack(stretch) for stretch in stretches]
        sent = torch.cat([self.unpack(p, length, values.dtype) for p in packed_all])
        total = torch.zeros_like(stretches[0])
        for message in wire.swap(packed_all):
            total += self.unpack(message, length, values.dtype)
        total.div_(wire.size)
        if (kept := self.kept.get(turn.slot)) is not None and kept.numel() == length:
            total += kept
        packed = self.pack(total)
        self.kept[turn.slot] = total - self.unpack(packed, length, values.dtype)
        mean = torch.cat([self.unpack(m, length, values.dtype) for m in wire.gather(packed)])
        return mean[: values.numel()], sent[: values.numel()]


def _stretches(values: Tensor, ranks: int) -> list[Tensor]:
    """``values`` cut into equal parts of whole blocks, filled up with zeros."""
    length = -(-quantise.blocks_of(values.numel()) // ranks) * quantise.BLOCK
    missing = length * ranks - values.numel()
    padded = torch.cat([values, values.new_zeros(missing)]) if missing else values
    return list(padded.chunk(ranks))


def int8() -> Quantised:
    """Eight bits an element."""

    def pack(values: Tensor) -> Tensor:
        codes, scales = quantise.to_int8(values)
        return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)])

    def unpack(packed: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        head = 4 * quantise.blocks_of(count)
        scales = packed[:head].clone().view(torch.float32)
        return quantise.from_int8(packed[head:].view(torch.int8), scales, dtype)

    return Quantised(pack, unpack)


def signs() -> Quantised:
    """One bit an element."""

    def pack(values: Tensor) -> Tensor:
        packed, scales = quantise.to_signs(values)
        return torch.cat([scales.view(torch.uint8), packed])

    def unpack(packed: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        head = 4 * quantise.blocks_of(count)
        scales = packed[:head].clone().view(torch.float32)
        return quantise.from_signs(packed[head:], scales, count, dtype)

    return Quantised(pack, unpack)
