"""Top-k and random-k: only a few elements of a gradient travel, the largest or a seeded few."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.sync.compressed.formats import (
    Cast,
    Plain,
    Sent,
    Trip,
    Turn,
    as_bytes,
    from_bytes,
)
from paceline.sync.compressed.packing import (
    pack_positions,
    packed_positions_size,
    unpack_positions,
)

_MIX = 1_000_003
_SAMPLE = 1 << 16
_SLACK = 1.3
"""A threshold is guessed so that a little more than is wanted passes it: one sort of few."""


@dataclass(frozen=True)
class TopK:
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
        positions = largest(values, how_many(size, self.ratio))
        chosen = values[positions].to(self.dtype or values.dtype)
        return torch.cat([pack_positions(positions, size), as_bytes(chosen)])

    def unpack(self, packed: Tensor, count: int, dtype: torch.dtype, turn: Turn) -> Tensor:
        """Zeros where nothing was sent."""
        positions, numbers = self._read(packed, count, dtype)
        return numbers.new_zeros(count).index_copy_(0, positions, numbers)

    def _read(self, packed: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        count = how_many(size, self.ratio)
        head = packed_positions_size(count, size)
        numbers = from_bytes(packed[head:], self.dtype or dtype).to(dtype)
        return unpack_positions(packed[:head].clone(), count, size), numbers


@dataclass(frozen=True)
class RandomK:
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
        return drawn(size, how_many(size, self.ratio), seed, device)

    @staticmethod
    def _chosen(values: Tensor, positions: Tensor) -> Tensor:
        """Those drawn; one of them tells of a number elsewhere that is not finite."""
        chosen = values[positions]
        chosen[0] += values.abs().amax() * 0
        return chosen


def how_many(size: int, ratio: float) -> int:
    """How many of ``size`` elements a ``ratio`` stands for: one at least."""
    return min(size, max(1, math.ceil(size * ratio)))


def largest(values: Tensor, count: int) -> Tensor:
    """The ascending positions of the ``count`` elements of ``values`` (flat) that are largest.

    By size. Sorting all of a large tensor would take longer than sending it: a threshold guessed
    from a regular sample leaves few to sort. The result is exact all the same, but for ties.
    """
    size = values.numel()
    if count >= size:
        return torch.arange(size, device=values.device)
    sizes = values.abs()
    if (
        size > 4 * _SAMPLE and values.device.type == "cpu"
    ):  # a GPU is quick at it, and dislikes waiting
        sample = sizes[:: size // _SAMPLE]
        wanted = min(len(sample), math.ceil(len(sample) * count / size * _SLACK) + 8)
        threshold = sample.topk(wanted).values[-1]
        candidates = (sizes >= threshold).nonzero().squeeze(1)
        if count <= candidates.numel() <= size // 2:
            best = sizes[candidates].topk(count, sorted=False).indices
            return candidates[best].sort().values
    return sizes.topk(count, sorted=False).indices.sort().values


def drawn(size: int, count: int, seed: int, device: torch.device) -> Tensor:
    """``count`` ascending positions in ``range(size)``, the same on every rank for one ``seed``.

    One of each of ``count`` equal stretches: drawing without replacement from all would need a
    permutation of them.
    """
    draw = torch.Generator().manual_seed(seed)
    edges = torch.arange(count + 1, dtype=torch.int64) * size // count
    offsets = torch.rand(count, generator=draw, dtype=torch.float64)
    lengths = edges[1:] - edges[:-1]
    return (edges[:-1] + (offsets * lengths).to(torch.int64)).to(device)
