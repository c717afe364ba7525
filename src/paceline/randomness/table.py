"""From a tensor's shape, and the part of it that a rank holds, to a table of random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.randomness.attribution import Attribution
from paceline.randomness.counter import Numbers

Runs = Sequence[tuple[int, int]]
"""Stretches of indices along one dimension, in the order in which they are held: first, length."""


class TensorPart(NamedTuple):
    """What a tensor-parallel rank holds of a tensor: along each dimension of the whole, which."""

    shape: tuple[int, ...]
    runs: Sequence[Runs]

    def resized(self, shape: Sequence[int]) -> TensorPart:
        """The same part of a tensor in which some dimensions have another size, held whole."""
        runs = [
            own if size == old else [(0, size)]
            for own, size, old in zip(self.runs, shape, self.shape, strict=True)
        ]
        return TensorPart(tuple(shape), runs)

    @property
    def held(self) -> tuple[int, ...]:
        """The shape of what the rank holds."""
        return tuple(sum(length for _, length in run) for run in self.runs)


class DrawnNumbers(NamedTuple):
    """The numbers of one draw, in the shape that this rank holds of the tensor."""

    numbers: Numbers
    shape: tuple[int, ...]
    dim: int | None

    def of(self, take: Callable[[Numbers], Tensor]) -> Tensor:
        """What ``take`` makes of the numbers, as a tensor of the shape."""
        drawn = take(self.numbers)
        if not self.dim:
            return drawn.view(self.shape)
        rest = (*self.shape[: self.dim], *self.shape[self.dim + 1 :])
        return drawn.view(self.shape[self.dim], *rest).movedim(0, self.dim)


def lay_out(
    keys: tuple[Tensor, Tensor],
    site: tuple[Tensor | int, Tensor | int],
    where: Attribution,
    shape: tuple[int, ...],
    part: TensorPart | None,
) -> DrawnNumbers:
    """The numbers for a tensor of ``shape``; of which this rank holds a ``part``, or all.

    ``keys`` are those of the whole batch, first, and of each sample; ``site`` is the draw's.
    """
    device = keys[0].device
    first, second = keys[0] + site[0], keys[1] ^ site[1]
    if where.dim is None:
        positions = _positions(shape, part, None, device)
        held = shape if part is None else part.held
        return DrawnNumbers(Numbers(first[:1], second[:1], positions), held, None)
    rest = math.prod(shape) // max(shape[where.dim], 1)
    first, second = first[1:], second[1:]
    if where.group > 1:  # the position goes on from one entry of a sample to its next
        steps = torch.arange(where.group, dtype=torch.int32, device=device) * _wrapped(rest)
        first = (first.unsqueeze(1) + steps).flatten()
        second = second.unsqueeze(1).expand(-1, where.group).flatten()
    held = shape
    if part is not None:
        held = part.held
        if held[where.dim] != shape[where.dim]:
            chosen = _indices(part.runs[where.dim], device).long()
            first, second = first[chosen], second[chosen]
    positions = _positions(shape, part, where.dim, device)
    return DrawnNumbers(Numbers(first, second, positions), held, where.dim)


def _positions(
    shape: tuple[int, ...], part: TensorPart | None, without: int | None, device: torch.device
) -> Tensor:
    """Where each held element stands in the whole tensor, not counting the samples' dimension."""
    dims = [dim for dim in range(len(shape)) if dim != without]
    if part is None:
        count = math.prod([shape[dim] for dim in dims])
        return torch.arange(count, dtype=torch.int32, device=device)
    total = torch.zeros((), dtype=torch.int32, device=device)
    stride = 1
    for place, dim in enumerate(reversed(dims)):
        along = _indices(part.runs[dim], device) * _wrapped(stride)
        total = total + along.view(-1, *(1,) * place)
        stride *= shape[dim]
    return total.flatten()


def _indices(runs: Runs, device: torch.device) -> Tensor:
    pieces = [torch.arange(a, a + n, dtype=torch.int32, device=device) for a, n in runs]
    if not pieces:
        return torch.zeros(0, dtype=torch.int32, device=device)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _wrapped(value: int) -> int:
    """A factor as int32 arithmetic has it; a tensor with more elements a sample goes round."""
    value %= 1 << 32
    return value - (1 << 32) if value >= 1 << 31 else value
