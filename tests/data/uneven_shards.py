"""Shards for tests: uneven ones, and readers of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, IterableDataset

Shard = tuple[int, int]
"""The number of its first sample, and how many it has."""


def shards_of(counts: list[int]) -> list[Shard]:
    return [(sum(counts[:at]), count) for at, count in enumerate(counts)]


def read(shard: Shard) -> Iterator[int]:
    first, count = shard
    yield from range(first, first + count)


def read_from(shard: Shard, start: int = 0) -> Iterator[int]:
    first, count = shard
    yield from range(first + start, first + count)


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Presharded(IterableDataset[int]):
    """A stream that says what its shards are."""

    def __init__(self, counts: list[int]) -> None:
        self.shards = shards_of(counts)

    def read_shard(self, shard: Shard) -> Iterator[int]:
        return read(shard)

    def __iter__(self) -> Iterator[int]:
        for shard in self.shards:
            yield from self.read_shard(shard)


def every(loaders: list[Any], batches: int | None = None) -> list[int]:
    """The samples of all ranks in the global order, of some batches or of a whole epoch."""
    order = []
    for step, parts in enumerate(zip(*loaders, strict=True), 1):
        order += [int(sample) for part in parts for sample in part]
        if step == batches:
            break
    return order
