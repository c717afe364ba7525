"""What ``bench wire`` finds, as plain data that goes to JSON and back, and what follows from it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, median, stdev
from typing import Any

PLAIN = "none"
WARM_UP = 2
"""The first steps are unlike the others: connections, buckets and optimizer state are made."""
LEAST_STEPS = 5
"""A trial makes so many at least, to know what a step takes and how much its loss moves."""
_WINDOW = 10


@dataclass(frozen=True)
class Trial:
    """One format on the user's model. What could not be measured is ``None``.

    ``losses`` and ``seconds`` are those of every step, the loss of the whole global batch and the
    time of the slowest rank. ``loss_at_steps`` is the loss after the steps that all trials have in
    common, ``loss_at_time`` that after ``steps_at_time`` steps, as many as fit into the time that
    plain needs for those.
    """

    format: str
    refused: str = ""
    """Why it was not tried."""
    failed: str = ""
    """What ended it."""
    step_seconds: float | None = None
    sent_per_step: float | None = None
    """Bytes of gradients that a rank sends, the one that sends most."""
    loss_at_steps: float | None = None
    loss_at_time: float | None = None
    steps_at_time: int | None = None
    meetings: int | None = None
    """Of DiLoCo's local steps alone: how often the ranks met until ``loss_at_steps``."""
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def measured(self) -> bool:
        """Whether it can be compared with others."""
        return not self.refused and not self.failed and self.step_seconds is not None


@dataclass(frozen=True)
class WireSetting:
    """Where and on what it was measured; ``machines`` are host names by node."""

    machines: list[str]
    ranks: list[int]
    device: str
    backend: str
    torch: str
    model: str
    parameters: int
    layout: str
    loss: str
    """``validation`` or ``training``: which losses are compared."""


@dataclass
class WireResult:
    """All of it. ``steps`` is how many all trials have in common, 0 before that is known."""

    setting: WireSetting
    steps: int = 0
    trials: list[Trial] = field(default_factory=list)
    plain_again: float | None = None
    """What a step of plain took after all others: the machines may have become busy, or idle."""
    complete: bool = False
    """Whether all trials that were asked for are there."""

    def of(self, format: str) -> Trial | None:
        """The trial of one format."""
        return next((trial for trial in self.trials if trial.format == format), None)

    @property
    def plain_seconds(self) -> float | None:
        """What a step of plain takes."""
        plain = self.of(PLAIN)
        return None if plain is None else plain.step_seconds

    @property
    def equal_seconds(self) -> float | None:
        """The time that plain needs for the steps that all have in common."""
        seconds = self.plain_seconds
        return None if seconds is None else self.steps * seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain values; numbers that JSON has no word for become ``None``."""
        data = dataclasses.asdict(self)
        for trial in data["trials"]:
            trial["losses"] = [x if math.isfinite(x) else None for x in trial["losses"]]
            for name in ("loss_at_steps", "loss_at_time"):
                if trial[name] is not None and not math.isfinite(trial[name]):
                    trial[name] = None
        return data

    @staticmethod
    def from_dict(data: dict[str, Any]) -> WireResult:
        """A result from ``to_dict``."""
        trials = []
        for one in data["trials"]:
            losses = [math.nan if x is None else x for x in one["losses"]]
            trials.append(Trial(**{**one, "losses": losses}))
        return WireResult(
            setting=WireSetting(**data["setting"]),
            steps=data["steps"],
            trials=trials,
            plain_again=data["plain_again"],
            complete=data["complete"],
        )


def typical_seconds(seconds: Sequence[float], period: int = 1) -> float:
    """What a step takes: the median, without the first ones.

    Where only every ``period``-th step waits for other ranks, that of whole periods counts.
    """
    if period == 1:
        return median(seconds[WARM_UP:] or seconds[-1:])
    rounds = [seconds[i : i + period] for i in range(0, len(seconds) - period + 1, period)]
    if not rounds:
        return mean(seconds[WARM_UP:] or seconds)
    return median(mean(own) for own in (rounds[1:] or rounds))


def window(steps: int) -> int:
    """Over how many of ``steps`` steps a loss is averaged, so that it is not one batch's."""
    return max(1, min(_WINDOW, steps // 3))


def smoothed(losses: Sequence[float], steps: int, width: int) -> float:
    """The mean loss of the ``width`` steps up to ``steps``."""
    return mean(losses[max(0, steps - width) : steps])


def noise(losses: Sequence[float], width: int) -> float:
    """By how much two losses may differ that are means over ``width`` steps, by chance alone.

    Two standard errors of such a difference. How much one step's loss scatters is taken from the
    changes from step to step, without their mean, which is what was learnt.
    """
    recent = [x for x in losses[-max(3 * width, 12) :] if math.isfinite(x)]
    changes = [b - a for a, b in itertools.pairwise(recent)]
    if len(changes) < 2:
        return 0.0
    scatter = stdev(changes) / math.sqrt(2)
    return 2 * scatter * math.sqrt(2 / width)
