"""Choosing the few elements of a gradient that travel: the largest, or a seeded few."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SAMPLE = 1 << 16
_SLACK = 1.3
"""A threshold is guessed so that a little more than is wanted passes it: one sort of few."""


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
