"""What a rank reads of a checkpoint to fill its parts: the overlap of two sets of boxes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Size
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from paceline.checkpoint.boxes import Box, overlap
from paceline.checkpoint.manifest import Manifest, TensorEntry
from paceline.checkpoint.rank_state import Part, check_piece
from paceline.checkpoint.tensor_bytes import dtype_of
from paceline.errors import CheckpointError

_SHOWN = 5


def read_plan(parts: Mapping[str, Part], manifest: Manifest) -> list[ReadItem]:
    """What to read to fill ``parts``: each item a box of something stored, and where it goes.

    Refuses parts that the checkpoint does not hold, or holds otherwise.
    """
    if missing := [name for name in parts if name not in manifest.tensors]:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} holds no tensor "
            f"{', '.join(map(repr, missing[:_SHOWN]))}{more}. It is that of another model or "
            "optimizer: build them as they were built then."
        )
    items: list[ReadItem] = []
    for name, part in parts.items():
        entry = manifest.tensors[name]
        _check_same(name, part, entry)
        for number, piece in enumerate(part.pieces):
            check_piece(name, part, piece)
            items += _reads(name, number, piece.box, entry)
    return items


def _check_same(name: str, part: Part, entry: TensorEntry) -> None:
    if part.shape != entry.shape:
        raise CheckpointError(
            f"tensor {name!r} has shape {entry.shape} in the checkpoint and {part.shape} here. "
            "Build the model as it was built then."
        )
    if part.dtype != dtype_of(entry):
        raise CheckpointError(
            f"tensor {name!r} is {dtype_of(entry)} in the checkpoint and {part.dtype} here. Build "
            "the model in the dtype it was saved in: nothing is converted on the way."
        )


def _reads(name: str, number: int, box: Box, entry: TensorEntry) -> list[ReadItem]:
    """How to fill ``box``, which is piece ``number`` of this rank's part."""
    items, found = [], 0
    for index, stored in enumerate(entry.stored):
        # Most of what hundreds of ranks stored is far from here: seen at a glance.
        if (
            box.offset
            and not -stored.box.shape[0] < stored.box.offset[0] - box.offset[0] < box.shape[0]
        ):
            continue
        common = overlap(box, stored.box)
        if common is None:
            continue
        found += common.size
        items.append(
            ReadItem(
                LoadItemType.TENSOR,
                dest_index=MetadataIndex(name, box.offset, number),
                dest_offsets=Size(common.within(box).offset),
                storage_index=MetadataIndex(name, stored.box.offset, index),
                storage_offsets=Size(common.within(stored.box).offset),
                lengths=Size(common.shape),
            )
        )
    if found != box.size:
        raise CheckpointError(
            f"tensor {name!r}: of the {box.size} elements of the box {box} the checkpoint "
            f"holds {found}. It was not saved whole."
        )
    return items
