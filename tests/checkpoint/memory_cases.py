"""States for snapshots in memory, cut over ranks in two ways, and ranks on nodes of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.checkpoint.boxes import Box
from paceline.checkpoint.hashing import XXH3, Digest
from paceline.checkpoint.memory.checkpoint import MemoryCheckpoint
from paceline.checkpoint.memory.find import snapshots_in_memory
from paceline.checkpoint.memory.segment_files import ROOT
from paceline.checkpoint.memory.snapshots import MemorySnapshots
from paceline.checkpoint.rank_state import Part, Piece, RankState, whole_part
from paceline.errors import CheckpointError

ROWS, COLUMNS = 24, 30


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def group() -> dist.ProcessGroup | None:
    """A group of all ranks that nothing else uses."""
    return dist.new_group(backend="gloo") if dist.is_initialized() else None


def weights(step: int) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float64).reshape(ROWS, COLUMNS) + step * 1000


def bias(step: int) -> torch.Tensor:
    return torch.full((7,), step, dtype=torch.bfloat16)


def box(rank: int, size: int, *, by_columns: bool = False) -> Box:
    length = COLUMNS if by_columns else ROWS
    first, end = rank * length // size, (rank + 1) * length // size
    if by_columns:
        return Box((0, first), (ROWS, end - first))
    return Box((first, 0), (end - first, COLUMNS))


def state(step: int, *, extra: int = 0) -> RankState:
    """This rank's part of the state after ``step``: rows of one tensor, all of another."""
    rank, size = rank_and_size()
    own = box(rank, size)
    tensors = {
        "w": Part((ROWS, COLUMNS), torch.float64, (Piece(own, weights(step)[own.slices()]),)),
        "b": whole_part(bias(step)),
    }
    if extra:
        tensors["extra"] = whole_part(torch.full((extra,), float(step)))
    objects: dict[str, object] = {f"random/{rank}": {"step": step, "text": "x" * (step * 37)}}
    if rank == 0:
        objects["loop"] = {"step": step}
    return RankState(tensors, objects)


def empty_parts(*, by_columns: bool = False) -> dict[str, Part]:
    rank, size = rank_and_size()
    own = box(rank, size, by_columns=by_columns)
    target = torch.full(own.shape, -1.0, dtype=torch.float64)
    return {
        "w": Part((ROWS, COLUMNS), torch.float64, (Piece(own, target),)),
        "b": whole_part(torch.zeros(7, dtype=torch.bfloat16)),
    }


def root_of(roots: Sequence[str]) -> str:
    """The shared memory of this rank's node: ranks are spread evenly over ``roots``."""
    rank, size = rank_and_size()
    return roots[rank * len(roots) // size]


def make_roots(folder: Path, nodes: int) -> list[str]:
    roots = [folder / f"node{number}" for number in range(nodes)]
    for root in roots:
        root.mkdir()
    return [str(root) for root in roots]


def take(
    roots: Sequence[str], steps: Sequence[int], after: int | None = None, identity: str = ""
) -> list[str]:
    """Take a snapshot of each step, and leave them."""
    tier = MemorySnapshots("run", group(), after=after, identity=identity, root=root_of(roots))
    for step in steps:
        tier.snapshot(step, state(step), {"reason": "test"})
    tier.close()
    return [] if tier.note is None else [tier.note]


def recall(
    roots: Sequence[str], by_columns: bool = False, identity: str = ""
) -> tuple[str, int, list[str]] | None:
    """Find the newest snapshot and check all of it: its rung, its step, and what was said."""
    said: list[str] = []
    own = root_of(roots)
    found = find_in_memory("run", group(), identity=identity, root=own, on_problem=said.append)
    if found is None:
        return None
    parts = empty_parts(by_columns=by_columns)
    found.load(parts)
    piece = parts["w"].pieces[0]
    assert torch.equal(piece.tensor, weights(found.step)[piece.box.slices()])
    assert torch.equal(parts["b"].pieces[0].tensor, bias(found.step))
    assert found.manifest.info == {"reason": "test"}
    assert found.read_object("loop") == {"step": found.step}
    assert found.read_object("random/0")["text"] == "x" * (found.step * 37)
    found.close()
    return found.rung, found.step, said


def find_in_memory(
    run: str | os.PathLike[str],
    group: dist.ProcessGroup | None,
    *,
    identity: str = "",
    root: str | os.PathLike[str] = ROOT,
    on_problem: Callable[[str], None] | None = None,
    digest: Digest = XXH3,
) -> MemoryCheckpoint | None:
    """The newest snapshot that is whole, from copies where need be. A collective.

    ``None`` where there is none; what was not whole is told to ``on_problem``.
    """
    for held in snapshots_in_memory(
        run, group, identity=identity, root=root, on_problem=on_problem, digest=digest
    ):
        try:
            return held.open()
        except CheckpointError as error:
            if on_problem is not None:
                on_problem(str(error))
    return None
