"""Which saved state to go on from: the newest that is whole, from the fastest place it is in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True)
class Tried:
    """What became of a rung: restored from (``ok``), or why not; ``step`` is ``None`` if empty."""

    rung: str
    step: int | None
    ok: bool
    detail: str
    seconds: float


@dataclass(frozen=True)
class Rung(Generic[T]):
    """A state that might be restored: of which step, by what; ``restore`` raises where it fails."""

    name: str
    step: int
    restore: Callable[[], T]


def climb(
    rungs: Sequence[Rung[T]],
    report: Callable[[Tried], None],
    *,
    agree: Callable[[str | None], str | None] = lambda problem: problem,
) -> T | None:
    """Restore from the first rung that can be; ``None`` where there is no rung at all.

    ``rungs`` are in the order in which they are preferred among equals: a newer step goes before
    an older one wherever it is, and what is stepped over for it is still there if it fails. Each
    attempt is told to ``report``.

    A rung fails by a ``CheckpointError``. All ranks must come to the same end: ``agree`` is given
    what went wrong on this rank, or ``None``, and returns what went wrong on any. Where all rungs
    fail, that is an error: to begin again without a word would throw the run away.
    """
    for rung in _stepped_over(rungs):
        newest = max(one.step for one in rungs)
        detail = f"stepped over: there is a checkpoint of step {newest}."
        report(Tried(rung.name, rung.step, False, detail, 0.0))
    problem: str | None = None
    for rung in sorted(rungs, key=lambda rung: -rung.step):
        began = time.monotonic()
        restored: T | None = None
        try:
            restored = rung.restore()
            problem = None
        except CheckpointError as error:
            problem = str(error)
        problem = agree(problem)
        report(
            Tried(rung.name, rung.step, problem is None, problem or "", time.monotonic() - began)
        )
        if problem is None:
            return restored
    if problem is None:
        return None
    raise CheckpointError(
        f"{problem} There is nothing older to go on from. To start over, choose another run_dir."
    )


def _stepped_over(rungs: Sequence[Rung[T]]) -> list[Rung[T]]:
    """The rungs that would have come first, were it not for a newer step; one of each name."""
    first: dict[str, Rung[T]] = {}
    if rungs:
        newest = max(rungs, key=lambda rung: rung.step)
        for rung in rungs[: rungs.index(newest)]:
            if rung.name != newest.name:
                first.setdefault(rung.name, rung)
    return list(first.values())
