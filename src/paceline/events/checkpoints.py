"""Events of checkpoints: saved, not saved, tried to resume from."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.events.event import Event, Seconds


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is complete on disk, verified, and safe to resume from.

    ``reason`` is ``every``, ``minutes``, ``epoch``, ``best``, ``asked``, ``retry`` (an earlier one
    failed), ``stop`` or ``end``;
    ``seconds`` is how long writing took, ``stalled`` how long the run stood still for it.
    """

    step: int
    path: str
    bytes: int
    seconds: Seconds
    reason: str
    stalled: Seconds = 0.0


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written; earlier ones are as they were."""

    step: int
    reason: str
    error: str


@dataclass(frozen=True, kw_only=True)
class RestoreTried(Event):
    """A place to resume from was tried: memory, a partner's memory, or a checkpoint on disk."""

    rung: str
    step: int | None
    ok: bool
    detail: str
    seconds: Seconds
