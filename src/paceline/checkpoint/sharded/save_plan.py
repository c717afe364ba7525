"""Which rank writes what of a state: planned without any bytes.

torch.distributed.checkpoint's default planners are not used: they take boxes that begin at one
place for equal, drop all but one object of a name without a word, weigh a box as if it were its
whole tensor, and unpickle what they load. Its items are made where they are needed and not sent
between ranks: that takes seconds from a few dozen ranks on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Size
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from paceline.checkpoint.boxes import Box, overlap
from paceline.errors import CheckpointError

Tensors = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""The shapes and dtypes of whole tensors by name."""
_ALIGNMENT = 64


BoxKey = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A box of a tensor: its name, where the box begins, its shape."""


@dataclass(frozen=True)
class RankOffer:
    """What a rank has to give to the save of ``step``: objects are given with their sizes.

    It knows the ``tensors`` by name, and holds ``boxes`` of them. Plain tuples, for there may be
    many, and one rank gets those of all.
    """

    step: int
    tensors: Tensors
    boxes: Sequence[BoxKey]
    objects: Mapping[str, int]


def tensor_item(key: BoxKey, tensors: Tensors) -> WriteItem:
    """The item that writes a box of a tensor."""
    name, offset, lengths = key
    shape, dtype = tensors[name]
    chunk = ChunkStorageMetadata(Size(offset), Size(lengths))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), Size(shape))
    return WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data)


def object_item(name: str, length: int) -> WriteItem:
    """The item that writes an object of ``length`` bytes."""
    data = BytesIOWriteData(length)
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, bytes_io_data=data)


def box_of(item: WriteItem) -> Box:
    """Which elements a tensor's item writes."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def bytes_of(item: WriteItem) -> int:
    """How many bytes an item writes."""
    if item.tensor_data is None:
        assert item.bytes_io_data is not None
        return item.bytes_io_data.nbytes
    return box_of(item).size * item.tensor_data.properties.dtype.itemsize


def aligned(at: int) -> int:
    """The first byte from ``at`` on where a box may begin, to be mapped into memory."""
    return at + -at % _ALIGNMENT


def shared_out(given: Sequence[RankOffer]) -> tuple[list[list[int]], Tensors]:
    """For each rank which of its boxes it is to write, by number; and all tensors there are.

    Refuses a state whose ranks contradict each other or leave elements of a tensor out.
    """
    tensors = _agreed_tensors(given)
    _check_objects(given)
    holders: dict[BoxKey, list[int]] = defaultdict(list)
    for rank, own in enumerate(given):
        for key in own.boxes:
            holders[key].append(rank)
    boxes: dict[str, dict[Box, int]] = {name: {} for name in tensors}
    for key, ranks in holders.items():
        boxes[key[0]][Box(*key[1:])] = ranks[0]
    for name, first_holders in boxes.items():
        _check_cover(name, tensors[name][0], first_holders)
    writers = _balanced(holders, tensors, [sum(own.objects.values()) for own in given])
    shares = [
        [number for number, key in enumerate(own.boxes) if writers[key] == rank]
        for rank, own in enumerate(given)
    ]
    return shares, tensors


def _agreed_tensors(given: Sequence[RankOffer]) -> Tensors:
    tensors: Tensors = {}
    first: dict[str, int] = {}
    for rank, own in enumerate(given):
        if own.step != given[0].step:
            raise CheckpointError(
                f"rank 0 saves step {given[0].step} and rank {rank} step {own.step}. All ranks "
                "must save after the same step. Nothing was written."
            )
        for name, (shape, dtype) in own.tensors.items():
            known = tensors.setdefault(name, (shape, dtype))
            other = first.setdefault(name, rank)
            if known != (shape, dtype):
                raise CheckpointError(
                    f"tensor {name!r} is {known[1]} of shape {known[0]} on rank {other} and "
                    f"{dtype} of shape {shape} on rank {rank}. Nothing was written."
                )
    return tensors


def _check_objects(given: Sequence[RankOffer]) -> None:
    givers: dict[str, int] = {}
    for rank, own in enumerate(given):
        for name in own.objects:
            first = givers.setdefault(name, rank)
            if first != rank:
                raise CheckpointError(
                    f"object {name!r} is given by rank {first} and by rank {rank}: only one of "
                    "them can be saved. Let one rank give it, or give it a name for each rank. "
                    "Nothing was written."
                )


def _check_cover(name: str, shape: tuple[int, ...], boxes: Mapping[Box, int]) -> None:
    """Raise unless the boxes (by the rank that gives each) are the whole tensor, once."""
    for one, other in _close_pairs(list(boxes)):
        if overlap(one, other) is not None:
            raise CheckpointError(
                f"tensor {name!r}: the box {one} of rank {boxes[one]} and the box "
                f"{other} of rank {boxes[other]} overlap without being equal: which one "
                "counts? Nothing was written."
            )
    given, wanted = sum(box.size for box in boxes), Box((0,) * len(shape), shape).size
    if given != wanted:
        raise CheckpointError(
            f"tensor {name!r} of shape {shape}: the ranks together give {given} of its {wanted} "
            f"elements, in {len(boxes)} boxes. Every element must be given. Nothing was written."
        )


def _close_pairs(boxes: list[Box]) -> Iterator[tuple[Box, Box]]:
    """Pairs that might overlap: those that do along the dimension with the most beginnings."""
    if len(boxes) < 2 or not boxes[0].offset:
        return
    starts = [len({box.offset[d] for box in boxes}) for d in range(len(boxes[0].offset))]
    along = starts.index(max(starts))
    boxes.sort(key=lambda box: box.offset[along])
    for i, one in enumerate(boxes):
        end = one.offset[along] + one.shape[along]
        for j in range(i + 1, len(boxes)):
            if boxes[j].offset[along] >= end:
                break
            yield one, boxes[j]


def _balanced(
    holders: Mapping[BoxKey, list[int]], tensors: Tensors, load: list[int]
) -> dict[BoxKey, int]:
    """Which of its holders writes each box: the one with the least to write, largest boxes first.

    ``load`` is what ranks write already. What only one rank holds comes before all else.
    """
    writers: dict[BoxKey, int] = {}
    sizes = {key: math.prod(key[2]) * tensors[key[0]][1].itemsize for key in holders}
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -sizes[key])):
        writers[key] = rank = min(holders[key], key=load.__getitem__)
        load[rank] += sizes[key]
    return writers
