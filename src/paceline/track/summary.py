"""What came of a run, gathered from its events."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.events import (
    FILE_NAME,
    Baseline,
    CheckpointSaved,
    EvalDone,
    Event,
    Restarting,
    RunFinished,
    RunStarted,
    StepDone,
    WireUsed,
    read,
)
from paceline.events.wording import restart_reason
from paceline.formatting import duration, number, plural, samples_per_second, size


@dataclass
class Summary:
    """The last word on everything; speed is that of the latest start."""

    step: StepDone | None = None
    evaluation: EvalDone | None = None
    baseline: Baseline | None = None
    checkpoint: CheckpointSaved | None = None
    finished: RunFinished | None = None
    """How the run ended; ``None`` while it goes on, or when it was cut short."""
    restarts: list[Restarting] = field(default_factory=list)
    """Every time the ranks were started again without anybody asking."""
    wire: list[WireUsed] = field(default_factory=list)
    """What gradients cost on the wire, where that was counted, since the latest start."""
    first_step: int = 0
    """How many steps were done when the run was started for the last time."""
    samples: int = 0
    training_seconds: float = 0.0
    _saved: list[CheckpointSaved] = field(default_factory=list)

    @classmethod
    def read(cls, run_dir: str | os.PathLike[str]) -> Summary:
        """Of the run in a folder; empty when it has written no event yet."""
        path = Path(run_dir) / FILE_NAME
        return cls.of(read(path)) if path.exists() else cls()

    @classmethod
    def of(cls, events: Iterable[Event]) -> Summary:
        """Of these events, oldest first."""
        summary = cls()
        for event in events:
            summary.add(event)
        return summary

    def add(self, event: Event) -> None:
        """Take in one more event."""
        if isinstance(event, RunStarted):
            self.samples, self.training_seconds = 0, 0.0
            self.wire, self.first_step = [], event.first_step
            self._forget_after(event.first_step)
        elif isinstance(event, StepDone):
            self.finished = None  # not by a start alone, which may have been refused
            self.step = event
            self.samples += event.samples
            self.training_seconds += event.seconds
        elif isinstance(event, EvalDone):
            self.evaluation = event
        elif isinstance(event, Baseline):
            self.baseline = event
        elif isinstance(event, CheckpointSaved):
            self.checkpoint = event
            self._saved.append(event)
        elif isinstance(event, RunFinished):
            self.finished = event
        elif isinstance(event, WireUsed):
            self.wire.append(event)
        elif isinstance(event, Restarting):
            self.restarts.append(event)

    def _forget_after(self, step: int) -> None:
        """The run goes on from ``step``: what was saved or measured later is no longer its own."""
        self._saved = [saved for saved in self._saved if saved.step <= step]
        self.checkpoint = self._saved[-1] if self._saved else None
        if self.evaluation is not None and self.evaluation.step > step:
            self.evaluation = None

    def lines(self) -> list[str]:
        """The outcome of a finished run, for a person."""
        lines = [self._headline()]
        if self.step is not None:
            lines.append(f"  train loss       {number(self.step.loss)}")
        if self.evaluation is not None:
            for name, value in self.evaluation.metrics.items():
                line = f"  {'validation ' + name:<16} {number(value)}"
                if name == "loss" and self.baseline is not None:
                    line += f"  ({self.baseline.name}: {number(self.baseline.loss)})"
                lines.append(line)
        if self.wire:
            lines.append(f"  on the wire      {self._wire()}")
        if self.checkpoint is not None:
            lines.append(f"  checkpoint       {self.checkpoint.path}")
        if self.restarts:
            reasons = Counter(map(restart_reason, self.restarts))
            told = ", ".join(f"{times} × {reason}" for reason, times in reasons.items())
            lines.append(f"  restarts         {told} (paceline diagnose tells more)")
        return lines

    def _wire(self) -> str:
        """Of the steps that sent what the last one sent: a warm-up is no part of the figure."""
        what = self.wire[-1].what
        alike = [event for event in self.wire if event.what == what]
        steps = sum(event.steps for event in alike)
        sent = sum(max(event.bytes_sent) for event in alike) // steps
        plain = sum(max(event.bytes_plain) for event in alike) // steps
        if what == "warmup":
            told = f"{size(sent)} of gradients a step and rank"
            return f"{told}: nothing was compressed, all {plural(steps, 'step')} were warm-up"
        if what == "distances":
            told = f"{size(sent)} a step and rank, instead of {size(plain)} of gradients"
        else:
            told = f"{size(sent)} of gradients a step and rank"
            told += f", instead of {size(plain)}" if sent < plain else ""
        before = alike[0].step - alike[0].steps
        if before == 0:
            return told
        if before == self.first_step:
            return f"{told} (since it was resumed at step {before})"
        first = "steps together" if what == "distances" else "steps of warm-up"
        return f"{told} (after {before} {first})"

    def _headline(self) -> str:
        if self.finished is None:
            return "the run left no record of its end"
        verb = {"done": "done", "stopped": "stopped early"}.get(self.finished.reason, "stopped")
        speed = ""
        if self.training_seconds:
            speed = f", {samples_per_second(self.samples / self.training_seconds)}"
        steps = plural(self.finished.step, "step")
        return f"{verb}: {steps}, {duration(self.finished.seconds)}{speed}"
