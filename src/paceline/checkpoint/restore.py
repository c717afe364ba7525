"""Going on from the newest state that is whole: in memory, on a partner's node, on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch.distributed as dist

from paceline.checkpoint import meeting
from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.ladder import Rung, Tried, climb
from paceline.checkpoint.memory_checkpoint import MemoryCheckpoint
from paceline.checkpoint.memory_files import ROOT
from paceline.checkpoint.part import Part
from paceline.checkpoint.recall import (
    OWN_MEMORY,
    PARTNER_MEMORY,
    HeldSnapshot,
    snapshots_in_memory,
)
from paceline.checkpoint.save import load
from paceline.errors import CheckpointError

T = TypeVar("T")
DISK = "disk"


def restore_newest(
    run: str | os.PathLike[str],
    folder: Folder,
    group: dist.ProcessGroup | None,
    restore: Callable[[Checkpoint], T],
    report: Callable[[Tried], None],
    *,
    memory: bool = True,
    identity: str = "",
    root: str | os.PathLike[str] = ROOT,
) -> T | None:
    """What ``restore`` makes of the newest state of ``run`` that is whole. A collective.

    ``restore`` is given a checkpoint, in memory or on disk, all of it checked, and loads it with
    :func:`load_parts` and ``read_object``. Where it raises ``CheckpointError``, on any rank, the
    next rung is tried. Each rung tried is told to ``report``, on every rank. ``None`` where there
    is no state at all; an error where there is one and it cannot be restored. For ``group``,
    ``identity`` and ``root`` see ``MemoryTier``.
    """
    rungs = (
        memory_rungs(run, group, restore, report, identity=identity, root=root) if memory else []
    )
    rungs += disk_rungs(folder, group, restore)
    return climb(rungs, report, agree=lambda problem: meeting.first_problem(problem, group))


def load_parts(
    checkpoint: Checkpoint, parts: Mapping[str, Part], group: dist.ProcessGroup | None
) -> None:
    """Fill the memory of ``parts`` from a checkpoint, on disk or in memory. A collective."""
    if isinstance(checkpoint, MemoryCheckpoint):
        checkpoint.load(parts)
    else:
        load(checkpoint, parts, group)


def memory_rungs(
    run: str | os.PathLike[str],
    group: dist.ProcessGroup | None,
    restore: Callable[[Checkpoint], T],
    report: Callable[[Tried], None],
    *,
    identity: str = "",
    root: str | os.PathLike[str] = ROOT,
) -> list[Rung[T]]:
    """The snapshots in memory, newest first. A collective, and so is each ``restore``."""

    def tell(problem: str) -> None:
        report(Tried(OWN_MEMORY, None, False, problem, 0.0))

    try:
        held = snapshots_in_memory(run, group, identity=identity, root=root, on_problem=tell)
    except CheckpointError as error:
        tell(str(error))
        return []
    if not held:
        tell("no node holds a snapshot of this run in memory.")

    def restorer(snapshot: HeldSnapshot, copies: bool) -> Callable[[], T]:
        def restored() -> T:
            checkpoint = snapshot.open(copies=copies)
            try:
                return restore(checkpoint)
            finally:
                checkpoint.close()

        return restored

    rungs: list[Rung[T]] = []
    for snapshot in held:
        rungs.append(Rung(OWN_MEMORY, snapshot.step, restorer(snapshot, False)))
        if snapshot.has_copies:
            rungs.append(Rung(PARTNER_MEMORY, snapshot.step, restorer(snapshot, True)))
    return rungs


def disk_rungs(
    folder: Folder, group: dist.ProcessGroup | None, restore: Callable[[Checkpoint], T]
) -> list[Rung[T]]:
    """The checkpoints in a folder, newest first. A collective, and so is each ``restore``."""
    steps: list[int] = []
    problem = None
    if meeting.rank_in(group) == 0:  # what one rank sees is what counts
        try:
            steps = [checkpoint.step for checkpoint in folder.checkpoints()]
        except CheckpointError as error:
            problem = str(error)
    steps, problem = meeting.gather((steps, problem), group)[0]
    if problem is not None:
        raise CheckpointError(problem)

    def restorer(checkpoint: Checkpoint) -> Callable[[], T]:
        def restored() -> T:
            meeting.agree(_damage_in_share(checkpoint, group), group)
            return restore(checkpoint)

        return restored

    return [Rung(DISK, step, restorer(folder.get(step))) for step in reversed(steps)]


def _damage_in_share(checkpoint: Checkpoint, group: dist.ProcessGroup | None) -> str | None:
    """Check this rank's share of the files; what is wrong with them, if anything is."""
    try:
        files = sorted(checkpoint.manifest.files)[meeting.rank_in(group) :: meeting.size_of(group)]
        damages = checkpoint.damages(files=files)
    except CheckpointError as error:
        return str(error)
    if not damages:
        return None
    more = f" And {len(damages) - 1} more like this." if len(damages) > 1 else ""
    return f"checkpoint {checkpoint.path}: {damages[0]}{more}"
