"""Which elements of a tensor a rank holds: boxes in it, and where they meet. Numbers only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """The elements from ``offset`` on, ``shape`` of them along each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """``[0:4, 2:3]``."""
        ranges = (f"{o}:{o + s}" for o, s in zip(self.offset, self.shape, strict=True))
        return f"[{', '.join(ranges)}]"

    @property
    def size(self) -> int:
        """How many elements it holds."""
        return math.prod(self.shape)

    def within(self, outer: Box) -> Box:
        """The same elements counted from where ``outer`` begins."""
        offset = tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return Box(offset, self.shape)

    def slices(self) -> tuple[slice, ...]:
        """An index that picks these elements out of the tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """All elements of a tensor of this ``shape``."""
    return Box((0,) * len(shape), tuple(shape))


def overlap(a: Box, b: Box) -> Box | None:
    """The elements that both hold; ``None`` where there are none."""
    offset = tuple(map(max, a.offset, b.offset))
    ends = (
        min(ao + size, bo + other)
        for ao, size, bo, other in zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    )
    shape = tuple(end - start for end, start in zip(ends, offset, strict=True))
    return Box(offset, shape) if all(length > 0 for length in shape) else None


Runs = Sequence[tuple[int, int]]
"""Stretches of indices along one dimension, in the order in which they are held: first, length."""


def boxes_of(runs: Sequence[Runs]) -> Iterator[tuple[Box, Box]]:
    """What a rank holds that took the indices ``runs[d]`` along each dimension d.

    Yields pairs: the box in the whole tensor, and the box of the same elements in the rank's own.
    """
    for chosen in itertools.product(*map(_with_positions, runs)):
        shape = tuple(length for _, _, length in chosen)
        yield (
            Box(tuple(first for first, _, _ in chosen), shape),
            Box(tuple(position for _, position, _ in chosen), shape),
        )


def _with_positions(runs: Runs) -> list[tuple[int, int, int]]:
    starts = itertools.accumulate((length for _, length in runs), initial=0)
    return [(first, at, length) for (first, length), at in zip(runs, starts, strict=False)]
