"""Taking over a checkpoint, on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.memory.checkpoint import MemoryCheckpoint
from paceline.checkpoint.rank_state import Part
from paceline.checkpoint.sharded.save_load import load
from paceline.errors import CheckpointDamaged, CheckpointError, is_damage
from paceline.world import World, collectives

T = TypeVar("T")


def fill(world: World, checkpoint: Checkpoint, parts: dict[str, Part]) -> None:
    """Fill ``parts`` from ``checkpoint``; a collective that succeeds or fails on all ranks."""
    if isinstance(checkpoint, MemoryCheckpoint):
        checkpoint.load(parts)
    else:
        load(checkpoint, parts, world.background_group("checkpoint"))


def on_all_ranks(action: Callable[[], T]) -> T:
    """Do it on every rank; where one fails, all do."""
    failure, result = None, None
    try:
        result = action()
    except CheckpointError as error:
        failure = str(error), is_damage(error)
    failures = [told for told in collectives.all_gather_object(failure) if told is not None]
    if failures:
        all_damage = all(damage for _, damage in failures)
        raise (CheckpointDamaged if all_damage else CheckpointError)(failures[0][0])
    assert result is not None
    return result


class CheckpointDoesNotFit(Exception):
    """A checkpoint that is no good here for another reason than damage: no older one would do."""

    def __init__(self, reason: CheckpointError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def first_problem(problem: str | None) -> str | None:
    """What went wrong on any rank, given what did on this one. A collective."""
    return next((told for told in collectives.all_gather_object(problem) if told), None)


class OpenedCheckpoint:
    """The manifest and the objects of a checkpoint, read and checked."""

    def __init__(self, checkpoint: Checkpoint, wanted: Callable[[str], bool]) -> None:
        self.manifest: Manifest = checkpoint.manifest
        self._objects = {
            name: checkpoint.read_object(name) for name in self.manifest.objects if wanted(name)
        }

    def read_object(self, name: str) -> Any:
        """One of the plain values that the checkpoint holds."""
        return self._objects[name]
