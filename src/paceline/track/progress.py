"""The progress of a run, for a person: a live bar on a terminal, lines now and then elsewhere."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Protocol, TextIO

from paceline.events import (
    Baseline,
    CheckpointFailed,
    CheckpointSaved,
    EpochDone,
    EvalDone,
    Event,
    EventsLost,
    GaveUp,
    HangFound,
    HangOver,
    NodeJoined,
    NodeLeft,
    NonFinite,
    Note,
    RankLost,
    RanksStarted,
    Restarting,
    RestoreTried,
    RunFailed,
    RunFinished,
    RunStarted,
    StepDone,
    Straggler,
)
from paceline.track.pace import Pace, clock, count, duration, number, plural, rate, size
from paceline.untrusted import printable


@dataclass(frozen=True)
class StepView:
    """What there is to show of a step."""

    step: int
    total: int | None
    loss: str
    speed: str
    left: str
    time: float

    @property
    def status(self) -> str:
        """Loss, speed and time left in one string."""
        parts = [f"loss {self.loss}", f"{self.speed} samples/s"]
        return ", ".join([*parts, f"ETA {self.left}"] if self.left else parts)


class Display(Protocol):
    """Where progress is drawn."""

    def say(self, text: str, *, warning: bool = False) -> None:
        """Write one line that stays."""

    def prepare(self) -> None:
        """Steps will come, but not at once."""

    def begin(self, total: int | None, done: int) -> None:
        """``total`` steps lie ahead, ``done`` of which are done; may come again on a restart."""

    def step(self, view: StepView) -> None:
        """Show the latest step."""

    def end(self) -> None:
        """No steps follow, for now."""


class Progress:
    """Shows a run as it goes: loss, samples/s, time left, evaluations, checkpoints, troubles.

    ``stream`` is standard output unless given. On a terminal there is a live bar with lines above
    it; elsewhere (a file, a pipe, a notebook) only lines, a few a minute at most.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._display: Display | None = None
        self._pace = Pace()
        self._total: int | None = None
        self._gone = False

    def handle(self, event: Event) -> None:
        """Show what is worth showing of an event."""
        if self._gone:
            return
        try:
            self._show(event)
        except (OSError, ValueError):
            # Nobody is looking any more (closed pipe, hung-up terminal). That is not the run's
            # trouble, and there is nobody to tell.
            self._gone = True

    def close(self) -> None:
        """Take the bar down, leaving its last state."""
        if self._display is not None and not self._gone:
            try:
                self._display.end()
            except (OSError, ValueError):
                self._gone = True

    def _show(self, event: Event) -> None:
        if self._display is None:
            self._display = _display_for(self._stream or sys.stdout)
        if isinstance(event, StepDone):
            self._pace.add(event)
            self._display.step(self._view(event))
        elif isinstance(event, RunStarted):
            self._pace.start_anew()
            self._total = event.total_steps
            self._display.say(_describe(event) or "")
            self._display.begin(event.total_steps, event.first_step)
        elif isinstance(event, RunFinished | RunFailed):
            self._display.end()
        elif (text := _describe(event)) is not None:
            self._display.say(text, warning=_is_warning(event))
        if isinstance(event, RanksStarted):
            self._display.prepare()

    def _view(self, event: StepDone) -> StepView:
        left = self._pace.seconds_left(self._total)
        return StepView(
            step=event.step,
            total=self._total,
            loss=number(event.loss) + (" (skipped)" if event.skipped else ""),
            speed=rate(self._pace.samples_per_second),
            left="" if left is None else clock(left),
            time=event.time,
        )


class Lines:
    """Progress as lines: the first and the last step, each tenth of the run, and by the clock."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._total: int | None = None
        self._started: float | None = None
        self._shown: StepView | None = None
        self._latest: StepView | None = None

    def say(self, text: str, *, warning: bool = False) -> None:
        """Write one line."""
        shown = printable(text)
        self._stream.write(f"warning: {shown}\n" if warning else f"{shown}\n")
        self._stream.flush()

    def prepare(self) -> None:
        """Nothing to show of it."""

    def begin(self, total: int | None, done: int) -> None:
        """A new stretch of steps: its first will be shown."""
        self._total, self._shown, self._latest = total, None, None

    def step(self, view: StepView) -> None:
        """Write a line for this step if it is time for one."""
        self._started = view.time if self._started is None else self._started
        self._latest = view
        if self._is_due(view):
            self._write(view)

    def end(self) -> None:
        """Write the last step, if it has not been."""
        if self._latest is not None and self._latest is not self._shown:
            self._write(self._latest)
        self._latest = None

    def _is_due(self, view: StepView) -> bool:
        if self._shown is None or view.step == self._total:
            return True
        if self._total is not None:
            tenths = (self._shown.step * 10 // self._total, view.step * 10 // self._total)
            if tenths[0] != tenths[1]:
                return True
        # Every 5 s at first; in a run of hours, once a minute.
        assert self._started is not None
        interval = min(60.0, max(5.0, (view.time - self._started) / 50))
        return view.time - self._shown.time >= interval

    def _write(self, view: StepView) -> None:
        self._shown = view
        step = f"{view.step}" if view.total is None else f"{view.step}/{view.total}"
        self.say(f"step {step}: {view.status}")


def line_of(event: Event) -> str | None:
    """What a person is told of an event, in one line; ``None`` for those that need none."""
    if (text := _describe(event)) is None:
        return None
    return f"warning: {text}" if _is_warning(event) else text


def _display_for(stream: TextIO) -> Display:
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        from paceline.track.bar import Bar

        return Bar(stream)
    return Lines(stream)


def _is_warning(event: Event) -> bool:
    if isinstance(event, Note):
        return event.level == "warning"
    if isinstance(event, RestoreTried):  # a rung that is simply not there is no trouble
        return not event.ok and event.step is not None
    if isinstance(event, NodeLeft):
        return event.reason == "lost"
    return isinstance(
        event,
        NonFinite | CheckpointFailed | EventsLost | RankLost | GaveUp | HangFound | Straggler,
    )


def _describe(event: Event) -> str | None:
    """An event as a line; ``None`` for those that need none."""
    match event:
        case RanksStarted():
            return f"starting {_ranks(event)}"
        case RunStarted():
            steps = "" if event.total_steps is None else f", {plural(event.total_steps, 'step')}"
            begin = f"; going on after step {event.first_step}" if event.first_step else ""
            return (
                f"training {count(event.parameters)} parameters on "
                f"{plural(event.world_size, 'rank')} ({event.layout}, {event.device}, "
                f"{event.precision}), global batch {event.global_batch}{steps}{begin}"
            )
        case EvalDone():
            metrics = ", ".join(f"{name} {number(v)}" for name, v in event.metrics.items())
            return f"step {event.step}: validation {metrics} ({duration(event.seconds)})"
        case EpochDone():
            return (
                f"step {event.step}: epoch {event.epoch + 1} done, mean loss {number(event.loss)}"
            )
        case CheckpointSaved():
            best = "best so far, " if event.reason == "best" else ""
            return f"step {event.step}: saved {event.path} ({best}{size(event.bytes)})"
        case EventsLost():
            lasted = duration(event.time - event.since)
            lost = f"{plural(event.count, 'event')} of the last {lasted} could not be written"
            return f"{lost}: {event.error}"
        case CheckpointFailed():
            return f"step {event.step}: NOT saved: {event.error}"
        case RestoreTried(ok=True):
            return f"resuming from {event.rung}, step {event.step} ({duration(event.seconds)})"
        case RestoreTried(step=int()):
            return f"cannot resume from {event.rung}, step {event.step}: {event.detail}"
        case NonFinite():
            ranks = ", ".join(str(rank) for rank in event.ranks)
            where = f" on rank {ranks}" if ranks else ""
            then = {"skip": "the step was skipped", "stop": "the run stops"}.get(event.action, "")
            detail = f" {event.detail}" if event.detail else ""
            return f"step {event.step}: NaN or Inf in the {event.what}{where}; {then}.{detail}"
        case Baseline():
            return f"for comparison, {event.name}: validation loss {number(event.loss)}"
        case Note():
            return event.message
        case _:
            return _describe_trouble(event)


def _describe_trouble(event: Event) -> str | None:
    """What befalls the ranks and their machines."""
    match event:
        case RankLost():
            host = f" on {event.host}" if event.host else ""
            who = f"rank {event.rank}{host}" if event.rank >= 0 else "the run"
            how = {"hang": "hung", "node": "was lost with its machine"}.get(event.cause, "failed")
            log = f"; its log: {event.log}" if event.log else ""
            if event.told_at_end:
                return f"{_at(event.step)}{who} {how}"
            return f"{_at(event.step)}{who} {how}: {event.error.rstrip('.')}{log}"
        case Restarting():
            budget = "" if event.budget is None else f", restart {event.used} of {event.budget}"
            delay = f" in {duration(event.delay)}" if event.delay else ""
            # What failed or hung has just been said.
            told = event.reason in ("failure", "hang")
            detail = f": {event.detail}" if event.detail and not told else ""
            why = event.reason.replace("_", " ")
            return f"all ranks are started again{delay} ({why}{budget}){detail}"
        case GaveUp():
            return f"giving up: {event.reason}"
        case NodeLeft():
            how = {"lost": "is lost", "preempted": "was told to leave"}.get(event.reason, "left")
            return f"machine {event.host} {how}"
        case NodeJoined():
            return f"machine {event.host} joined"
        case HangFound():
            if not event.seconds:  # seen without any standing still
                return f"{_at(event.step)}{event.summary}"
            then = {
                "restart": "; if it goes on, all ranks are restarted",
                "stop": "; if it goes on, the run is stopped",
            }
            stood = f"nothing has moved for {duration(event.seconds)}: {event.summary}"
            # The rest of the report, below its first line: every rank, and the stacks.
            _, newline, rest = event.detail.partition("\n")
            return f"{_at(event.step)}{stood}{then.get(event.action, '')}{newline}{rest}"
        case HangOver():
            return f"{_at(event.step)}moving again, after {duration(event.seconds)}"
        case Straggler():
            host = f" on {event.host}" if event.host else ""
            waits = f"the others wait {event.costs:.3g} s a step for it ({event.share:.0%})"
            return f"step {event.step}: rank {event.rank}{host} is slow in {event.phase}: {waits}"
        case _:
            return None


def _ranks(event: RanksStarted) -> str:
    text = plural(event.world_size or event.nproc, "rank")
    if len(event.nodes) > 1:
        text += f" on {len(event.nodes)} machines ({', '.join(event.nodes)})"
    return f"{text}, {event.idle} more standing by" if event.idle else text


def _at(step: int | None) -> str:
    return "" if step is None else f"step {step}: "
