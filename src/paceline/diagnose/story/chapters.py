"""What happened in a run, in order, in words: one chapter an event, steps drawn together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.diagnose.story.worlds import World
from paceline.events import Event, RankLost, RunFailed, StepDone
from paceline.events.wording import describe
from paceline.formatting import number, samples_per_second


@dataclass(frozen=True)
class Chapter:
    """One thing that happened; ``detail`` is all there is to say of it, in lines.

    ``trouble`` marks what went wrong, ``minor`` what a short telling leaves out.
    """

    time: float
    kind: str
    text: str
    step: int | None = None
    detail: str = ""
    trouble: bool = False
    minor: bool = False


def chapters_of(worlds: Sequence[World]) -> list[Chapter]:
    """The chapters of a run, oldest first."""
    return [chapter for world in worlds for chapter in _of_world(world)]


def _of_world(world: World) -> Iterator[Chapter]:
    steps: list[StepDone] = []
    for event in world.events:
        if isinstance(event, StepDone):
            steps.append(event)
            continue
        chapter = _of_event(event)
        if chapter is None or _is_told(event, world):
            continue
        if steps and not chapter.minor:  # a step or two between small things are not worth a line
            yield _of_steps(steps)
            steps = []
        yield chapter
    if steps:
        yield _of_steps(steps)
    if world.fault is not None and world.fault.kind == "cut_off":
        text = "the record of this start ends here, without an end"
        yield Chapter(world.ended, "CutOff", text, world.fault.step, trouble=True)


def _is_told(event: Event, world: World) -> bool:
    """A failed run repeats the error of the rank that was lost."""
    return isinstance(event, RunFailed) and world.first(RankLost) is not None


def _of_steps(steps: Sequence[StepDone]) -> Chapter:
    first, last = steps[0], steps[-1]
    seconds = sum(s.seconds for s in steps)
    samples = sum(s.samples for s in steps)
    speed = f", {samples_per_second(samples / seconds)}" if seconds else ""
    if first is last:
        text = f"step {first.step}: loss {number(first.loss)}"
    else:
        losses = f"loss {number(first.loss)} → {number(last.loss)}"
        text = f"steps {first.step} to {last.step}: {losses}{speed}"
    return Chapter(last.time, "Steps", text, last.step)


def _of_event(event: Event) -> Chapter | None:
    """An event as a chapter; ``None`` for those that hold only numbers."""
    if (wording := describe(event)) is None:
        return None
    return Chapter(
        event.time,
        type(event).__name__,
        wording.text,
        getattr(event, "step", None),
        wording.detail,
        wording.trouble,
        wording.minor,
    )
