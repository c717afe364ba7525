"""Which saved state to go on from: the newest that is whole, from the fastest place it is in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True)
class RestoreAttempt:
    """What became of a candidate: restored from (``ok``), or why not.

    ``rung`` names where it was; ``step`` is ``None`` where nothing was there.
    """

    rung: str
    step: int | None
    ok: bool
    detail: str
    seconds: float


@dataclass(frozen=True)
class RestoreCandidate(Generic[T]):
    """A state that might be restored: of which step, by what; ``restore`` raises where it fails."""

    name: str
    step: int
    restore: Callable[[], T]


def restore_newest(
    candidates: Sequence[RestoreCandidate[T]],
    report: Callable[[RestoreAttempt], None],
    *,
    agree: Callable[[str | None], str | None] = lambda problem: problem,
) -> T | None:
    """Restore from the first candidate that can be; ``None`` where there is none at all.

    ``candidates`` are in the order in which they are preferred among equals: a newer step goes
    before an older one wherever it is, and what is skipped for it is still there if it fails. Each
    attempt is given to ``report``.

    A candidate fails by a ``CheckpointError``. All ranks must come to the same end: ``agree`` is
    given what went wrong on this rank, or ``None``, and returns what went wrong on any. Where all
    candidates fail, that is an error: to begin again without a word would throw the run away.
    """
    for candidate in _stepped_over(candidates):
        newest = max(one.step for one in candidates)
        detail = f"stepped over: there is a checkpoint of step {newest}."
        report(RestoreAttempt(candidate.name, candidate.step, False, detail, 0.0))
    problem: str | None = None
    for candidate in sorted(candidates, key=lambda one: -one.step):
        began = time.monotonic()
        restored: T | None = None
        try:
            restored = candidate.restore()
            problem = None
        except CheckpointError as error:
            problem = str(error)
        problem = agree(problem)
        seconds, ok = time.monotonic() - began, problem is None
        report(RestoreAttempt(candidate.name, candidate.step, ok, problem or "", seconds))
        if problem is None:
            return restored
    if problem is None:
        return None
    raise CheckpointError(
        f"{problem} There is nothing older to go on from. To start over, choose another run_dir."
    )


def _stepped_over(candidates: Sequence[RestoreCandidate[T]]) -> list[RestoreCandidate[T]]:
    """The candidates that would have come first, were it not for a newer step; one of each name."""
    first: dict[str, RestoreCandidate[T]] = {}
    if candidates:
        newest = max(candidates, key=lambda one: one.step)
        for candidate in candidates[: candidates.index(newest)]:
            if candidate.name != newest.name:
                first.setdefault(candidate.name, candidate)
    return list(first.values())
