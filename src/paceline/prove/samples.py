"""Choosing samples of a batch, of whatever structure, and running a step on a chosen cut."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from paceline.engine import microbatches
from paceline.engine.batch import batch_size, map_leaves
from paceline.errors import DataError

SampleCut = Callable[[int], list[list[int]]]
"""From the number of samples in a batch to the samples of each microbatch."""


def take(batch: Any, samples: int, indices: list[int]) -> Any:
    """The samples at ``indices`` of a batch that holds ``samples`` of them."""

    def pick(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            chosen = torch.tensor(indices, dtype=torch.long)
            return leaf.index_select(0, chosen) if leaf.ndim > 0 else leaf
        if hasattr(leaf, "to"):
            raise DataError(f"cannot choose samples of a {type(leaf).__name__}.")
        if isinstance(leaf, list | tuple) and len(leaf) == samples:
            return type(leaf)(leaf[i] for i in indices)
        if getattr(leaf, "ndim", 0) > 0 and len(leaf) == samples:
            return leaf[indices]  # an array
        return leaf

    return map_leaves(batch, pick)


@contextlib.contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` replaced by ``value``, and put back."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def cutting(cut: SampleCut) -> contextlib.AbstractContextManager[None]:
    """While it lasts, steps of engines in this process cut their batches by ``cut``."""

    def split(batch: Any, most: int | None) -> list[Any]:
        samples = batch_size(batch)
        return [take(batch, samples, indices) for indices in cut(samples)]

    return swapped(microbatches, "split", split)


def shuffled(samples: int, seed: int) -> list[int]:
    """The samples of a batch in another order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(samples, generator=generator).tolist()
