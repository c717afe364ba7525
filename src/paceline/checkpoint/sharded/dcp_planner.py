"""The planners that torch.distributed.checkpoint asks; what they answer is in ``save_plan``."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)

from paceline.checkpoint.boxes import Box
from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.rank_state import Part, RankState, check_piece
from paceline.checkpoint.sharded.dcp_errors import sendable_errors
from paceline.checkpoint.sharded.load_plan import read_plan
from paceline.checkpoint.sharded.save_plan import (
    BoxKey,
    RankOffer,
    Tensors,
    box_of,
    object_item,
    shared_out,
    tensor_item,
)
from paceline.errors import CheckpointError

_PLAIN = "Let it hold tensors, numbers, strings, lists and dicts only. Nothing was written."


class StateSavePlanner(SavePlanner):
    """Saves a ``RankState``; ``problem`` is why this rank has none to give, if it has none."""

    def __init__(self, step: int, state: RankState, problem: str | None = None) -> None:
        self._step = step
        self._state = state
        self._problem = problem
        self._pieces: dict[BoxKey, Tensor] = {}
        self._objects: dict[str, bytes] = {}
        self._tensors: Tensors = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing to do: the state is known."""

    @sendable_errors
    def create_local_plan(self) -> SavePlan:
        """All that this rank could write."""
        if self._problem is not None:
            raise CheckpointError(self._problem)
        for name, part in self._state.tensors.items():
            self._tensors[name] = tuple(part.shape), part.dtype
            for piece in part.pieces:
                check_piece(name, part, piece)
                if piece.box.size:
                    key = name, tuple(piece.box.offset), tuple(piece.box.shape)
                    self._pieces.setdefault(key, piece.tensor)
        for name, value in self._state.objects.items():
            self._objects[name] = object_bytes(name, value)
        sizes = {name: len(data) for name, data in self._objects.items()}
        given = RankOffer(self._step, self._tensors, tuple(self._pieces), sizes)
        return SavePlan([], planner_data=given)

    @sendable_errors
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Each box by one rank, each object by the rank that has it."""
        shares, tensors = shared_out([plan.planner_data for plan in all_plans])
        plans = [
            dataclasses.replace(plan, planner_data=share)
            for plan, share in zip(all_plans, shares, strict=True)
        ]
        return plans, Metadata({}, planner_data=tensors)

    @sendable_errors
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """What this rank writes."""
        keys = tuple(self._pieces)
        items = [tensor_item(keys[number], self._tensors) for number in new_plan.planner_data]
        items += [object_item(name, len(data)) for name, data in self._objects.items()]
        return dataclasses.replace(new_plan, items=items)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The piece, or the bytes of the object."""
        name = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._objects[name])
        box = box_of(write_item)
        return self._pieces[name, box.offset, box.shape]


class PartsLoadPlanner(LoadPlanner):
    """Fills ``parts`` from ``checkpoint``, each rank its own."""

    def __init__(self, checkpoint: Checkpoint, parts: Mapping[str, Part]) -> None:
        self._checkpoint = checkpoint
        self._parts = parts
        self._plan = LoadPlan([])

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing to do: the parts are known."""

    @sendable_errors
    def create_local_plan(self) -> LoadPlan:
        """Empty: nobody else needs to know what this rank reads, so it is not sent around."""
        self._plan = LoadPlan(read_plan(self._parts, self._checkpoint.manifest))
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Each rank its own."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """What this rank reads."""
        return self._plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never asked for: objects are read by ``Checkpoint.read_object``, without unpickling."""
        raise CheckpointError(f"{read_item.dest_index.fqn!r} is no tensor.")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The memory that is to hold what ``read_item`` reads."""
        index = read_item.dest_index
        assert index.index is not None
        piece = self._parts[index.fqn].pieces[index.index]
        if read_item.lengths == piece.tensor.shape:  # most often: a slice of all would cost time
            return piece.tensor.detach()
        box = Box(tuple(read_item.dest_offsets), tuple(read_item.lengths))
        return piece.tensor.detach()[box.slices()]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: it was read to where it belongs."""


def object_bytes(name: str, value: object) -> bytes:
    """``value`` as torch saves it; refused if it could not be loaded without executing code."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:  # pickle raises whatever an object's own methods raise
        raise CheckpointError(
            f"object {name!r} cannot be saved: {type(error).__name__}: {error}. {_PLAIN}"
        ) from error
    buffer.seek(0)
    foreign = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the unpickler trips over
        what = f"holds {', '.join(sorted(foreign))}, which" if foreign else "is made so that it"
        raise CheckpointError(
            f"object {name!r} {what} could not be loaded without executing code. {_PLAIN}"
        ) from error
    return buffer.getvalue()
