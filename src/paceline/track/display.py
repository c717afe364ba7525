"""What a display of progress is, and the plain one: lines of text, now and then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TextIO

from paceline.untrusted import printable

_PHASE_SECONDS = 10.0


@dataclass(frozen=True)
class StepView:
    """What there is to show of a step."""

    step: int
    total: int | None
    loss: str
    speed: str
    left: str
    time: float
    epoch: str = ""
    lr: str = ""
    logged: str = ""

    @property
    def status(self) -> str:
        """Loss, speed and time left in one string."""
        parts = [f"loss {self.loss}", *([self.logged] if self.logged else []), self.speed]
        return ", ".join([*parts, f"ETA {self.left}"] if self.left else parts)


@dataclass(frozen=True)
class PhaseView:
    """What there is to show of an evaluation, a prediction or a save while it goes on."""

    text: str
    done: int
    total: int | None
    left: str
    time: float

    @property
    def progress(self) -> str:
        """``evaluating 40/100``."""
        if not self.done and self.total is None:
            return self.text
        return f"{self.text} {self.done}" + ("" if self.total is None else f"/{self.total}")


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

    def phase(self, view: PhaseView) -> None:
        """Show what goes on between steps."""

    def end_phase(self) -> None:
        """It is over."""

    def end(self) -> None:
        """No steps follow, for now."""


class Lines:
    """Progress as lines: the first and the last step, each tenth of the run, and by the clock."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._total: int | None = None
        self._started: float | None = None
        self._shown: StepView | None = None
        self._latest: StepView | None = None
        self._phase_told: float | None = None

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

    def phase(self, view: PhaseView) -> None:
        """Write a line now and then, where it takes longer than a few seconds."""
        if self._phase_told is None:
            self._phase_told = view.time
        elif view.time - self._phase_told >= _PHASE_SECONDS:
            self._phase_told = view.time
            self.say(view.progress + (f", {view.left} to go" if view.left else ""))

    def end_phase(self) -> None:
        """The next one is shown when it has taken a few seconds, too."""
        self._phase_told = None

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
