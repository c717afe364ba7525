"""Which checkpoints stay. Numbers only: order is by step, and no clock is asked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from paceline.errors import ConfigError


@dataclass(frozen=True)
class Keep:
    """The newest ``last``, the ``best`` by ``metric``, and every step that ``every`` divides."""

    last: int = 2
    best: int = 0
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    every: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.last < 1:
            problems.append(f"keep last={self.last}: at least 1 has to stay.")
        if self.best < 0:
            problems.append(f"keep best={self.best}: it takes 0 (none) or more.")
        if self.best > 0 and not self.metric:
            problems.append(f"keep best={self.best}: by which metric? Name one with metric=.")
        if self.mode not in ("min", "max"):
            problems.append(f"keep mode={self.mode!r}: it is 'min' or 'max'.")
        if self.every is not None and self.every < 1:
            problems.append(f"keep every={self.every}: it takes 1 or more, or None for no such.")
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True)
class Entry:
    """A checkpoint in a folder. One known not to be ``good`` neither counts nor is deleted."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    good: bool = True


def to_delete(entries: Iterable[Entry], keep: Keep, newest: int | None = None) -> list[int]:
    """The steps that need not stay, oldest first.

    ``newest`` is the step that was saved and verified last: a later one in the folder is one that
    could not be used when the run resumed, so it does not count either. Without it, the latest
    good one is taken for verified. That one always stays.
    """
    good = [entry for entry in sorted(entries, key=lambda e: e.step) if entry.good]
    if newest is not None:
        good = [entry for entry in good if entry.step <= newest]
    stay = {entry.step for entry in good[-keep.last :]}
    stay |= {entry.step for entry in _by_merit(good, keep)[: keep.best]}
    if keep.every is not None:
        stay |= {entry.step for entry in good if entry.step % keep.every == 0}
    return [entry.step for entry in good if entry.step not in stay]


def best_step(entries: Iterable[Entry], keep: Keep) -> int | None:
    """The step of the best good checkpoint by ``keep.metric``; ``None`` where none has it."""
    ranked = _by_merit([entry for entry in entries if entry.good], keep)
    return ranked[0].step if ranked else None


def _by_merit(entries: list[Entry], keep: Keep) -> list[Entry]:
    """The best first; of equals the earlier. Those without the metric, or with NaN, are not in."""
    if keep.metric is None:
        return []
    sign = 1.0 if keep.mode == "min" else -1.0
    values = ((sign * entry.metrics.get(keep.metric, math.nan), entry) for entry in entries)
    ranked = [(value, entry) for value, entry in values if not math.isnan(value)]
    return [entry for _, entry in sorted(ranked, key=lambda pair: (pair[0], pair[1].step))]
