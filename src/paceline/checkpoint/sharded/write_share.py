"""A rank's share of a save: of what several ranks hold, the boxes that this one writes.

Planned once, used at every step.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from paceline.checkpoint.manifest import Manifest, ObjectEntry, Stored, TensorEntry
from paceline.checkpoint.rank_state import Part, RankState
from paceline.checkpoint.sharded import agreement
from paceline.checkpoint.sharded.dcp_planner import StateSavePlanner, object_bytes
from paceline.checkpoint.sharded.save_plan import aligned, box_of, bytes_of
from paceline.errors import CheckpointError


class WriteShare:
    """The boxes that this rank copies, and where in its file each begins.

    Holds for every state of the structure it was made for; ``fits`` says so.
    """

    def __init__(self, state: RankState, items: Sequence[WriteItem], file: str) -> None:
        self._structure = [*state.structure(), *state.objects]
        self._file = file
        self._sources: list[tuple[str, int]] = []
        self._places: list[tuple[int, int, torch.dtype, tuple[int, ...]]] = []
        stored: dict[str, list[Stored]] = {name: [] for name in state.tensors}
        end = 0
        for item in items:
            if item.tensor_data is None:
                continue  # objects change their size from step to step: they come last
            name, box, length = item.index.fqn, box_of(item), bytes_of(item)
            part, start = state.tensors[name], aligned(end)
            boxes = [piece.box for piece in part.pieces]
            self._sources.append((name, boxes.index(box)))
            self._places.append((start, length, part.dtype, box.shape))
            stored[name].append(Stored(box, file, start, length))
            end = start + length
        self.tensors_end = end
        self.on_cuda = any(
            piece.tensor.is_cuda for part in state.tensors.values() for piece in part.pieces
        )
        self.index = Manifest(0, tensors=_entries(state, stored)).to_bytes()

    def fits(self, state: RankState) -> bool:
        """Whether ``state`` has the names, shapes, dtypes and boxes that this share is of."""
        return [*state.structure(), *state.objects] == self._structure

    def views(self, memory: Tensor) -> list[Tensor]:
        """Where in ``memory`` each box goes."""
        return [
            memory[start : start + length].view(dtype).view(shape)
            for start, length, dtype, shape in self._places
        ]

    def sources(self, state: RankState) -> list[Tensor]:
        """What goes there."""
        return [state.tensors[name].pieces[number].tensor for name, number in self._sources]

    def place(self, objects: Mapping[str, bytes]) -> tuple[dict[str, ObjectEntry], int]:
        """Where objects go, behind the tensors; and how many bytes the file then has."""
        entries: dict[str, ObjectEntry] = {}
        end = self.tensors_end
        for name, data in objects.items():
            start = aligned(end)
            entries[name] = ObjectEntry(self._file, start, len(data))
            end = start + len(data)
        return entries, end


def plan_write_share(
    step: int, state: RankState, file: str, group: dist.ProcessGroup | None
) -> tuple[WriteShare | None, str | None]:
    """This rank's share, or why there is none on any rank. A collective.

    The same plan as that of a checkpoint on disk: each box by one rank, evenly spread.
    """
    planner = StateSavePlanner(step, state)
    try:
        mine: SavePlan | str = planner.create_local_plan()
    except CheckpointError as error:
        mine = str(error)
    given = agreement.gather_on_first(mine, group)
    answer = agreement.scatter_from_first(
        None if given is None else _share_out(planner, given), group
    )
    if isinstance(answer, str):
        return None, answer
    return WriteShare(state, planner.finish_plan(answer).items, file), None


class OwnBoxes:
    """Takes away from states what other ranks of ``group`` write.

    Which rank writes what is planned when a rank's state has other names, shapes, dtypes or boxes
    than before. A save plans anew with what is left, and refuses it where that is not everything.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._share: WriteShare | None = None

    def of(self, step: int, state: RankState) -> RankState:
        """``state`` with the boxes that this rank is to write. A collective.

        Where the ranks find no plan it is all of ``state``: the save will say why. Raises
        ``CheckpointError`` where a rank does not answer.
        """
        if agreement.group_size(self._group) == 1:
            return state
        # Objects are given by one rank each, and change their size from save to save.
        tensors = RankState(state.tensors)
        if agreement.any_of([not self._fits(tensors)], self._group)[0]:
            self._share = None
            self._share, _ = plan_write_share(step, tensors, "", self._group)
        if self._share is None:
            return state
        own = {id(tensor) for tensor in self._share.sources(tensors)}
        if len(own) == sum(len(part.pieces) for part in state.tensors.values()):
            return state
        parts = {
            name: Part(part.shape, part.dtype, tuple(p for p in part.pieces if id(p.tensor) in own))
            for name, part in state.tensors.items()
        }
        return RankState(parts, state.objects)

    def _fits(self, state: RankState) -> bool:
        try:
            return self._share is not None and self._share.fits(state)
        except Exception:  # the save reports it to all ranks, which wait for us here
            return False


def object_texts(objects: Mapping[str, object]) -> tuple[dict[str, bytes], str | None]:
    """Objects as torch saves them, or why they cannot be.

    Whether they can be loaded again is for ``check_loadable``, which takes longer.
    """
    texts: dict[str, bytes] = {}
    try:
        for name, value in objects.items():
            buffer = io.BytesIO()
            try:
                torch.save(value, buffer)
                texts[name] = buffer.getvalue()
            except Exception:  # pickle raises whatever an object's own methods raise
                texts[name] = object_bytes(name, value)  # which says it in words
    except CheckpointError as error:
        return {}, str(error)
    return texts, None


def check_loadable(name: str, text: bytes) -> None:
    """Raise where an object could not be read back without executing code."""
    try:
        torch.load(io.BytesIO(text), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the unpickler trips over
        raise CheckpointError(
            f"object {name!r} could not be loaded without executing code. Let it hold tensors, "
            "numbers, strings, lists and dicts only."
        ) from error


def _share_out(
    planner: StateSavePlanner, given: Sequence[SavePlan | str]
) -> Sequence[SavePlan | str]:
    """By rank, its share of the plan; the same text for all where something is wrong."""
    problem = agreement.joined_problems([one if isinstance(one, str) else None for one in given])
    if problem is None:
        try:
            return planner.create_global_plan([one for one in given if isinstance(one, SavePlan)])[
                0
            ]
        except CheckpointError as error:
            problem = str(error)
    return [problem] * len(given)


def _entries(state: RankState, stored: Mapping[str, list[Stored]]) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(part.shape, str(part.dtype).removeprefix("torch."), tuple(stored[name]))
        for name, part in state.tensors.items()
    }
