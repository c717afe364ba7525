"""Reading a checkpoint into a rank's parts: checked bytes, in the order of the files, each once."""

from __future__ import annotations

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from paceline.checkpoint.block_reader import BlockReader, Target
from paceline.checkpoint.boxes import Box, overlap
from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.hashing import BLOCK
from paceline.checkpoint.manifest import Stored
from paceline.checkpoint.sharded.dcp_errors import sendable_errors
from paceline.checkpoint.tensor_bytes import flat, memory_of

_WINDOW = 8 * BLOCK
"""What cannot be read to where it belongs is read this much at a time, and copied from there."""


@dataclass(frozen=True)
class _Wanted:
    """A box of something stored (counted from where that begins), and the memory it is to fill."""

    box: Box
    into: Tensor


class PartsReader(StorageReader):
    """Reads ``checkpoint``. Needs a planner whose items name what is stored by its number."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a reader is made for one checkpoint."""

    def read_metadata(self) -> Metadata:
        """Nothing: the manifest, which says it all, is read by the planner.

        An error raised here would be logged with its traceback, where it is raised there it
        reaches all ranks.
        """
        return Metadata({})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the memory that ``planner`` names."""
        self._read(plan.items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @sendable_errors
    @torch.no_grad()
    def _read(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        targets = [planner.resolve_tensor(item) for item in items]
        wanted: dict[Stored, list[_Wanted]] = defaultdict(list)
        for item, target in zip(items, targets, strict=True):
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            wanted[self._stored(item)].append(_Wanted(box, target))
        in_order = sorted(wanted, key=lambda stored: (stored.file, stored.start))
        for file, group in itertools.groupby(in_order, key=lambda stored: stored.file):
            with self._checkpoint.reader(file) as reader:
                self._read_file(reader, list(group), wanted)
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def _read_file(
        self,
        reader: BlockReader,
        in_order: Sequence[Stored],
        wanted: Mapping[Stored, list[_Wanted]],
    ) -> None:
        straight: list[Target] = []
        for stored in in_order:
            targets = _straight(stored, wanted[stored])
            if targets is not None:
                straight += targets
                continue
            reader.scatter(straight)  # first: a file is read from its beginning to its end
            straight = []
            self._fill(reader, stored, wanted[stored])
        reader.scatter(straight)

    def _stored(self, item: ReadItem) -> Stored:
        index = item.storage_index
        assert index.index is not None
        return self._checkpoint.manifest.tensors[index.fqn].stored[index.index]

    def _fill(self, reader: BlockReader, stored: Stored, wanted: list[_Wanted]) -> None:
        """Read what is wanted of one thing stored, a part of it at a time, and copy it."""
        itemsize = wanted[0].into.element_size()
        strides = _strides(stored.box.shape)
        for window in _windows(stored.box.shape, max(_WINDOW // itemsize, 1)):
            met = _met(window, wanted)
            if not met:
                continue
            first = min(_position(one.box.offset, strides) for one in met)
            end = max(_position(_last(one.box), strides) for one in met) + 1
            start = stored.start + first * itemsize
            if len(met) == 1 and _is_direct(window, met[0]):
                reader.read_into(start, memory_of(flat(met[0].into)))
                continue
            source = self._read_aside(reader, start, (end - first) * itemsize)
            source = source.view(met[0].into.dtype)
            for one in met:
                at = _position(one.box.offset, strides) - first
                one.into.copy_(source.as_strided(one.box.shape, strides, at))

    def _read_aside(self, reader: BlockReader, start: int, length: int) -> Tensor:
        if self._scratch.numel() < length:
            self._scratch = torch.empty(length, dtype=torch.uint8)
        read = self._scratch[:length]
        reader.read_into(start, memory_of(read))
        return read

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Not to be chosen by a path: it is made for one checkpoint."""
        return False


def _straight(stored: Stored, wanted: Sequence[_Wanted]) -> list[Target] | None:
    """Where the bytes of one thing stored go; ``None`` where they cannot go there straight."""
    targets: list[Target] = []
    for one in wanted:
        if not _is_direct(stored.box, one):
            return None
        first = _position(one.box.offset, _strides(stored.box.shape)) if any(one.box.offset) else 0
        start = stored.start + first * one.into.element_size()
        targets.append((start, memory_of(flat(one.into))))
    if len(targets) > 1:
        targets.sort(key=lambda target: target[0])
    return targets


def _is_direct(outer: Box, one: _Wanted) -> bool:
    """Whether the bytes can go straight to where they belong: in one run here and there."""
    return (
        one.into.is_cpu
        and one.into.is_contiguous()
        and not one.into.is_conj()
        and not one.into.is_neg()
        and _is_run(one.box, outer)
    )


def _is_run(box: Box, outer: Box) -> bool:
    """Whether ``box`` is one stretch of ``outer``, both stored row by row: some leading dimensions
    of length one, then one of any length, then whole ones.
    """
    lengths = list(zip(box.shape, outer.shape, strict=True))
    while lengths and lengths[-1][0] == lengths[-1][1]:
        lengths.pop()
    return all(length == 1 for length, _ in lengths[:-1])


def _windows(shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Boxes that together are all of ``shape``, each one stretch of at most ``limit`` elements."""
    if not shape:
        yield Box((), ())
        return
    along = 0
    while math.prod(shape[along + 1 :]) > limit:
        along += 1
    inner = shape[along + 1 :]
    rows = max(limit // math.prod(inner), 1)
    for outer in itertools.product(*(range(length) for length in shape[:along])):
        for row in range(0, shape[along], rows):
            yield Box(
                (*outer, row, *(0 for _ in inner)),
                (*(1 for _ in outer), min(rows, shape[along] - row), *inner),
            )


def _met(window: Box, wanted: Sequence[_Wanted]) -> list[_Wanted]:
    """What of ``wanted`` lies in ``window``."""
    met = []
    for one in wanted:
        common = overlap(window, one.box)
        if common is not None:
            met.append(_Wanted(common, one.into[common.within(one.box).slices()]))
    return met


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _position(offset: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum(o * s for o, s in zip(offset, strides, strict=True))


def _last(box: Box) -> tuple[int, ...]:
    return tuple(o + s - 1 for o, s in zip(box.offset, box.shape, strict=True))
