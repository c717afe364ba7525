"""What happened in a run, in order, in words: one entry per event, steps drawn together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.diagnose.story.attempts import Attempt
from paceline.events import Event, RankLost, RunFailed, StepDone
from paceline.events.wording import describe
from paceline.formatting import number, samples_per_second


@dataclass(frozen=True)
class TimelineEntry:
    """One thing that happened; ``detail`` is all there is to say of it, in lines.

    ``trouble`` marks what went wrong, ``minor`` what a short account leaves out.
    """

    time: float
    kind: str
    text: str
    step: int | None = None
    detail: str = ""
    trouble: bool = False
    minor: bool = False


def timeline_of(attempts: Sequence[Attempt]) -> list[TimelineEntry]:
    """The timeline of a run, oldest first."""
    return [entry for attempt in attempts for entry in _of_attempt(attempt)]


def _of_attempt(attempt: Attempt) -> Iterator[TimelineEntry]:
    steps: list[StepDone] = []
    for event in attempt.events:
        if isinstance(event, StepDone):
            steps.append(event)
            continue
        entry = _of_event(event)
        if entry is None or _is_told(event, attempt):
            continue
        if steps and not entry.minor:  # a step or two between small things are not worth a line
            yield _of_steps(steps)
            steps = []
        yield entry
    if steps:
        yield _of_steps(steps)
    if attempt.fault is not None and attempt.fault.kind == "cut_off":
        text = "the record of this start ends here, without an end"
        yield TimelineEntry(attempt.ended, "CutOff", text, attempt.fault.step, trouble=True)


def _is_told(event: Event, attempt: Attempt) -> bool:
    """A failed run repeats the error of the rank that was lost."""
    return isinstance(event, RunFailed) and attempt.first(RankLost) is not None


def _of_steps(steps: Sequence[StepDone]) -> TimelineEntry:
    first, last = steps[0], steps[-1]
    seconds = sum(s.seconds for s in steps)
    samples = sum(s.samples for s in steps)
    speed = f", {samples_per_second(samples / seconds)}" if seconds else ""
    if first is last:
        text = f"step {first.step}: loss {number(first.loss)}"
    else:
        losses = f"loss {number(first.loss)} → {number(last.loss)}"
        text = f"steps {first.step} to {last.step}: {losses}{speed}"
    return TimelineEntry(last.time, "Steps", text, last.step)


def _of_event(event: Event) -> TimelineEntry | None:
    """An event as an entry; ``None`` for those that hold only numbers."""
    if (wording := describe(event)) is None:
        return None
    return TimelineEntry(
        event.time,
        type(event).__name__,
        wording.text,
        getattr(event, "step", None),
        wording.detail,
        wording.trouble,
        wording.minor,
    )
