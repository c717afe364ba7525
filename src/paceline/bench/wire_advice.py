"""What to use, by the trials of ``bench wire``. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.bench.wire_result import PLAIN, Trial, noise, smoothed, window
from paceline.formatting import short_time, three_digits

WORTH = 1.05
"""By how much a format must be faster: less is gone when anything else changes."""
_ENOUGH_STEPS = 50
_DRIFT = 1.2
_ENOUGH_MEETINGS = 36
"""DiLoCo's outer momentum needs some dozens of meetings to pay."""


@dataclass(frozen=True)
class Advice:
    """A format, and why; ``remarks`` are what else to know before trusting it."""

    format: str
    reason: str
    pays: bool = False
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Judged:
    """A format that is faster a step than plain, and what its losses say."""

    trial: Trial
    step: float
    loss: float
    as_good: bool
    """Whether its loss after equal steps is no worse than plain's, but for noise."""
    wins_by_time: bool
    """Whether its loss after equal time is better, by more than noise."""

    @property
    def loss_by_time(self) -> float:
        """After equal time; infinite where that is not known."""
        found = self.trial.loss_at_time
        return math.inf if found is None else found


def recommend(
    trials: Sequence[Trial], steps: int, plain_again: float | None = None
) -> Advice | None:
    """The fastest format whose loss is no worse than plain's after ``steps`` steps.

    ``None`` where plain itself was not measured. A format whose loss after equal steps is clearly
    worse is recommended only where that after equal time is better than of plain and of all that
    keep up with it, and then that is said. ``plain_again`` is what a step of plain took after all
    others: the better one counts, and by as much as they differ a format has to be faster.
    """
    plain = next((trial for trial in trials if trial.format == PLAIN), None)
    if plain is None or not plain.measured or plain.loss_at_steps is None:
        return None
    others = [trial for trial in trials if trial is not plain and trial.measured]
    remarks = _drift(plain, plain_again) + _remarks(trials, plain, steps)
    worth = WORTH
    if plain_again is not None:
        low, high = sorted((_step(plain), plain_again))
        worth = max(worth, high / low)
        plain = dataclasses.replace(plain, step_seconds=low)
    if not others:
        return Advice(PLAIN, "nothing else was measured.", remarks=remarks)
    faster = [
        judged
        for trial in others
        if (judged := _judge(trial, plain, steps)) is not None
        and judged.step * worth < _step(plain)
    ]
    if not faster:
        return Advice(PLAIN, _no_faster(others, plain, worth), remarks=remarks)
    safe = _best_safe([one for one in faster if one.as_good])
    risky = [one for one in faster if one.wins_by_time and not one.as_good]
    best = min(risky, key=lambda one: one.loss_by_time, default=None)
    if best is None or (safe and best.loss_by_time >= safe.loss_by_time - tolerance(plain, steps)):
        best = safe
    if best is None:
        return Advice(PLAIN, _no_better(faster, plain, steps), remarks=remarks)
    if not best.as_good:
        remarks.insert(0, _warning(safe, plain))
    return Advice(best.trial.format, _praise(best, plain, steps), True, remarks)


def _best_safe(keeping_up: Sequence[_Judged]) -> _Judged | None:
    """The fastest; of those that are about as fast, the one with the lowest loss."""
    if not keeping_up:
        return None
    fastest = min(one.step for one in keeping_up)
    return min((one for one in keeping_up if one.step <= fastest * WORTH), key=lambda one: one.loss)


def tolerance(plain: Trial, steps: int) -> float:
    """Differences in the loss up to this are noise, by how plain's own loss scatters."""
    return noise(plain.losses[:steps], window(steps))


def _judge(trial: Trial, plain: Trial, steps: int) -> _Judged | None:
    loss, reference = trial.loss_at_steps, plain.loss_at_steps
    if loss is None or reference is None or trial.step_seconds is None:
        return None
    allowed = tolerance(plain, steps)
    by_time, plain_by_time = trial.loss_at_time, plain.loss_at_time
    wins_by_time = (
        by_time is not None and plain_by_time is not None and by_time < plain_by_time - allowed
    )
    return _Judged(trial, trial.step_seconds, loss, loss <= reference + allowed, wins_by_time)


def _step(trial: Trial) -> float:
    assert trial.step_seconds is not None
    return trial.step_seconds


def _no_faster(others: Sequence[Trial], plain: Trial, worth: float) -> str:
    fastest = min(others, key=_step)
    if _step(fastest) >= _step(plain):
        text = "every format that was tried is slower than plain"
    else:
        text = f"no format makes a step more than {worth - 1:.0%} faster"
        if worth >= _DRIFT:
            text += ", by which plain's own time has changed meanwhile"
    return (
        f"compression does not pay here: {text}. Plain takes {short_time(_step(plain))}, the "
        f"fastest other, {fastest.format}, {short_time(_step(fastest))}."
    )


def _no_better(faster: Sequence[_Judged], plain: Trial, steps: int) -> str:
    told = ", ".join(
        f"{one.trial.format} ({_times(plain, one.step)} as fast a step, loss "
        f"{_loss(one.loss)} after {steps} steps)"
        for one in sorted(faster, key=lambda one: one.step)[:3]
    )
    assert plain.loss_at_steps is not None
    return (
        "compression does not pay here: the formats that are faster learn less in the same time "
        f"than plain, whose loss is {_loss(plain.loss_at_steps)}: {told}."
    )


def _praise(best: _Judged, plain: Trial, steps: int) -> str:
    trial = best.trial
    assert plain.loss_at_steps is not None
    text = f"{short_time(best.step)} a step, {_times(plain, best.step)} as fast as plain"
    text += f" ({short_time(_step(plain))})"
    if trial.sent_per_step and plain.sent_per_step:
        text += f", {three_digits(plain.sent_per_step / trial.sent_per_step)} times fewer bytes"
    own, reference = _loss(best.loss), _loss(plain.loss_at_steps)
    if best.as_good:
        allowed = _loss(tolerance(plain, steps))
        return (
            f"{text}; loss {own} after {steps} steps, against {reference}: no worse (differences "
            f"up to {allowed} are noise)."
        )
    assert trial.loss_at_time is not None
    assert plain.loss_at_time is not None
    return (
        f"{text}. Its loss after {steps} steps is worse, {own} against {reference}; but after the "
        f"time that plain needs for them it has made {trial.steps_at_time} steps, and its loss is "
        f"better: {_loss(trial.loss_at_time)} against {_loss(plain.loss_at_time)}."
    )


def _warning(safe: _Judged | None, plain: Trial) -> str:
    text = "a loss that is behind at equal steps may stay behind: look at a longer trial"
    if safe is None:
        return f"{text}."
    return (
        f"{text}, or take {safe.trial.format}, whose loss keeps up, at "
        f"{_times(plain, safe.step)} the speed of plain."
    )


def _drift(plain: Trial, again: float | None) -> list[str]:
    if again is None:
        return []
    low, high = sorted((_step(plain), again))
    if high < _DRIFT * low:
        return []
    return [
        f"plain took {short_time(_step(plain))} a step at first, and {short_time(again)} after the "
        "other formats: something else is at work here, and times differ by chance. Measure again "
        "when these machines do nothing else."
    ]


def _remarks(trials: Sequence[Trial], plain: Trial, steps: int) -> list[str]:
    remarks = []
    learnt = plain.losses[0] - smoothed(plain.losses, steps, window(steps))
    if steps < _ENOUGH_STEPS:
        remarks.append(
            f"{steps} steps are too few to judge convergence by: this is about speed. Give "
            "--steps or --seconds to have more of them."
        )
    elif learnt < 3 * tolerance(plain, steps):
        remarks.append(
            f"plain's loss went from {_loss(plain.losses[0])} to "
            f"{_loss(plain.losses[0] - learnt)} in {steps} steps, little more than noise: too "
            "short to judge convergence by. Give --steps or --seconds to have more of them."
        )
    unknown = [t.format for t in trials if t.measured and t.loss_at_steps is None]
    if unknown:
        remarks.append(
            f"too slow to make {steps} steps in their share of the time: {', '.join(unknown)}."
        )
    return remarks + [_few_meetings(t, steps) for t in trials if _is_behind(t, plain, steps)]


def _is_behind(trial: Trial, plain: Trial, steps: int) -> bool:
    """Whether local steps have a clearly worse loss after too few meetings to tell by."""
    if trial.meetings is None or trial.meetings >= _ENOUGH_MEETINGS or not trial.measured:
        return False
    judged = _judge(trial, plain, steps)
    return judged is not None and not judged.as_good


def _few_meetings(trial: Trial, steps: int) -> str:
    met = "1 meeting" if trial.meetings == 1 else f"{trial.meetings} meetings"
    return (
        f"{trial.format}: {steps} steps are {met}, and DiLoCo's outer momentum needs some dozens "
        "to pay: its loss, which is behind, tells nothing of a long run. Give more --steps, or try "
        f"{':'.join(trial.format.split(':')[:2])}:average, which has no momentum."
    )


def _times(plain: Trial, step: float) -> str:
    return f"{three_digits(_step(plain) / step)} times"


def _loss(value: float) -> str:
    return f"{value:.4g}"
