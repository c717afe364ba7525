"""The live progress bar."""

from __future__ import annotations

from typing import TextIO

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.text import Text

from paceline.track.console import SafeConsole
from paceline.track.display import PhaseView, StepView


class Bar:
    """A bar at the bottom of the terminal, and lines above it.

    While it is up, whatever else this process prints appears above it too.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = SafeConsole(file=stream)
        self._progress: Progress | None = None
        self._steps: TaskID | None = None
        self._phase: TaskID | None = None

    def say(self, text: str, *, warning: bool = False) -> None:
        """Write one line above the bar."""
        # Text, not str: brackets in paths and messages are no markup.
        line = Text()
        if warning:
            line.append("warning: ", style="bold yellow")
        self._console.print(line.append(text), soft_wrap=True, highlight=False)

    def prepare(self) -> None:
        """Put up a bar that only pulses."""
        self._update(description="starting", total=None, completed=0, status="")

    def begin(self, total: int | None, done: int) -> None:
        """Set the bar to ``done`` of ``total``; without a total it only pulses."""
        self._update(description=_step(done, total), total=total, completed=done, status="")

    def step(self, view: StepView) -> None:
        """Move the bar."""
        more = [f"epoch {view.epoch}"] if view.epoch else []
        more += [f"lr {view.lr}"] if view.lr else []
        self._update(
            description=_step(view.step, view.total),
            total=view.total,
            completed=view.step,
            status=", ".join([view.status, *more]),
        )

    def phase(self, view: PhaseView) -> None:
        """Put up a second bar, below that of the steps, or move it."""
        progress = self._shown()
        if self._phase is None:
            self._phase = progress.add_task(view.progress, total=view.total, status="")
        progress.update(
            self._phase,
            description=view.progress,
            completed=view.done,
            total=view.total,
            status=f"{view.left} to go" if view.left else "",
        )

    def end_phase(self) -> None:
        """Take the second bar away."""
        if self._progress is not None and self._phase is not None:
            self._progress.remove_task(self._phase)
        self._phase = None

    def end(self) -> None:
        """Leave the bar where it is and give the terminal back."""
        if self._progress is not None:
            self.end_phase()
            self._progress.stop()
            self._progress = self._steps = None

    def _shown(self) -> Progress:
        """The display, put up where it is not there yet."""
        if self._progress is None:
            self._progress = Progress(
                SpinnerColumn(finished_text=" "),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=30),
                TextColumn("{task.fields[status]}", markup=False),
                console=self._console,
                refresh_per_second=8,
            )
            self._progress.start()
        return self._progress

    def _update(self, *, description: str, total: int | None, completed: int, status: str) -> None:
        progress = self._shown()
        if self._steps is None:
            self._steps = progress.add_task(description, total=total, status=status)
        task = next(task for task in progress.tasks if task.id == self._steps)
        task.total = total  # update() takes None as "leave it"
        progress.update(task.id, description=description, completed=completed, status=status)


def _step(step: int, total: int | None) -> str:
    return f"step {step}" if total is None else f"step {step}/{total}"
