"""The progress of a run, for a person: a live bar on a terminal, lines now and then elsewhere."""

from __future__ import annotations

import math
import os
import sys
from typing import TextIO

from paceline.events import (
    CheckpointFailed,
    CheckpointSaved,
    EpochDone,
    EvalDone,
    Event,
    PhaseProgress,
    RanksStarted,
    RunFailed,
    RunFinished,
    RunStarted,
    StepDone,
)
from paceline.events.wording import line_of, metrics_text, phase_text, warns
from paceline.formatting import clock, number, samples_per_second
from paceline.track.display import Display, Lines, PhaseView, StepView
from paceline.track.pace import Pace

_LOGGED_SHOWN = 3  # the bar has one line; events and trackers have all
_ENDS_A_PHASE = (
    StepDone,
    EvalDone,
    EpochDone,
    CheckpointSaved,
    CheckpointFailed,
    RunStarted,
    RunFinished,
    RunFailed,
)


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
        self._per_epoch: tuple[int | None, int | None] = (None, None)
        self._phase_began: float | None = None
        self._gone = False

    def handle(self, event: Event) -> None:
        """Show what is worth showing of an event."""
        if self._gone:
            return
        try:
            self._show(event)
        except (OSError, ValueError):
            # The reader is gone (closed pipe, hung-up terminal). That does not concern the run,
            # and there is nowhere to report it.
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
        if isinstance(event, PhaseProgress):
            self._display.phase(self._phase_view(event))
            return
        if self._phase_began is not None and isinstance(event, _ENDS_A_PHASE):
            self._phase_began = None
            self._display.end_phase()
        if isinstance(event, StepDone):
            self._pace.add(event)
            self._display.step(self._view(event))
        elif isinstance(event, RunStarted):
            self._pace.start_anew()
            self._total = event.total_steps
            self._per_epoch = event.samples_per_epoch, event.global_batch
            self._display.say(line_of(event) or "")
            self._display.begin(event.total_steps, event.first_step)
        elif isinstance(event, RunFinished | RunFailed):
            self._display.end()
        elif (text := line_of(event)) is not None:
            self._display.say(text, warning=warns(event))
        if isinstance(event, RanksStarted):
            self._display.prepare()

    def _view(self, event: StepDone) -> StepView:
        left = self._pace.seconds_left(self._total)
        return StepView(
            step=event.step,
            total=self._total,
            loss=number(event.loss) + (" (skipped)" if event.skipped else ""),
            speed=samples_per_second(self._pace.samples_per_second),
            left="" if left is None else clock(left),
            time=event.time,
            epoch=self._epoch(event),
            lr=f"{event.lr:.3g}",
            logged=metrics_text(dict(list(event.logged.items())[:_LOGGED_SHOWN])),
        )

    def _epoch(self, event: StepDone) -> str:
        """``2`` of as many as the steps come to, where that is known."""
        samples, batch = self._per_epoch
        if not samples or not batch or self._total is None:
            return f"{event.epoch + 1}"
        epochs = math.ceil(self._total / math.ceil(samples / batch))
        return f"{event.epoch + 1}/{max(epochs, event.epoch + 1)}"

    def _phase_view(self, event: PhaseProgress) -> PhaseView:
        if self._phase_began is None or event.done == 0:
            self._phase_began = event.time
        left = ""
        if event.total is not None and event.done:
            each = (event.time - self._phase_began) / event.done
            left = clock(each * max(0, event.total - event.done))
        text = phase_text(event.phase) or event.phase
        return PhaseView(text, event.done, event.total, left, event.time)


def _display_for(stream: TextIO) -> Display:
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        from paceline.track.bar import Bar

        return Bar(stream)
    return Lines(stream)
