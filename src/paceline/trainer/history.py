"""What a run went through: the values of its events, gathered for the person who called ``fit``."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import paceline.events as events
from paceline.errors import TrainingError
from paceline.events import (
    EpochDone,
    EvalDone,
    Event,
    HangFound,
    Logged,
    MediaLogged,
    Restarting,
    RunFinished,
    RunStarted,
    StepDone,
    StepSplit,
    Straggler,
    WireUsed,
)
from paceline.events.wording import at_step
from paceline.options.checkpointing import direction, known_direction
from paceline.options.habits.attributes import missing_attribute


@dataclass
class History:
    """Per-step, per-evaluation and per-epoch records of a run, in order.

    A step that was run again after a resume appears once, with its last values. What befell the
    run (restarts, hangs, stragglers) is all there: it did happen. The launcher's part of it, the
    restarts and hangs, is known where the events were read from disk.
    """

    steps: list[StepDone] = field(default_factory=list)
    evals: list[EvalDone] = field(default_factory=list)
    epochs: list[EpochDone] = field(default_factory=list)
    from_callbacks: list[Logged] = field(default_factory=list)
    """What callbacks have logged."""
    media: list[MediaLogged] = field(default_factory=list)
    """The images, histograms and texts that callbacks have logged: each names its file."""
    splits: list[StepSplit] = field(default_factory=list)
    """Where the time of the steps went, by rank."""
    wire: list[WireUsed] = field(default_factory=list)
    """The bytes of gradients that each rank sent, where that was counted."""
    stragglers: list[Straggler] = field(default_factory=list)
    hangs: list[HangFound] = field(default_factory=list)
    restarts: list[Restarting] = field(default_factory=list)
    reason: str = ""
    """Why the run ended: ``done``, ``stopped`` or ``interrupted``; empty while it runs."""
    seconds: float = 0.0
    """Total time of ``fit``, over all its resumes where the events were read from disk."""

    if not TYPE_CHECKING:  # a type checker knows which attributes there are

        def __getattr__(self, name: str) -> Any:
            return missing_attribute(self, "History", name)

    @classmethod
    def read(cls, run_dir: str | os.PathLike[str]) -> History:
        """The history of the run in ``run_dir``."""
        return cls.from_events(events.read(run_dir))

    @classmethod
    def from_events(cls, records: Iterable[Event]) -> History:
        """Gather ``records``, oldest first."""
        history = cls()
        for record in records:
            history.add(record)
        return history

    def add(self, event: Event) -> None:
        """Take in one more event."""
        if isinstance(event, StepDone):
            # After a resume the run has gone back: what came later did not happen.
            self._rewind(event.step)
            self.steps.append(event)
        elif isinstance(event, Logged):
            self.from_callbacks.append(event)
        elif isinstance(event, MediaLogged):
            self.media.append(event)
        elif isinstance(event, EvalDone):
            self.evals = [e for e in self.evals if e.step != event.step]
            self.evals.append(event)
        elif isinstance(event, EpochDone):
            self.epochs = [e for e in self.epochs if e.epoch != event.epoch]
            self.epochs.append(event)
        elif isinstance(event, RunStarted):
            # It goes on from an earlier step, or from the beginning: what came later is undone.
            self._rewind(event.first_step + 1)
            self.reason = ""
        elif isinstance(event, RunFinished):
            self.reason = event.reason
            self.seconds += event.seconds
        elif isinstance(event, StepSplit):
            self.splits.append(event)
        elif isinstance(event, WireUsed):
            self.wire.append(event)
        elif isinstance(event, Straggler):
            self.stragglers.append(event)
        elif isinstance(event, HangFound):
            self.hangs.append(event)
        elif isinstance(event, Restarting):
            self.restarts.append(event)

    def _rewind(self, step: int) -> None:
        if self.steps and self.steps[-1].step >= step:
            self.steps = [s for s in self.steps if s.step < step]
            self.evals = [e for e in self.evals if e.step < step]
            self.epochs = [e for e in self.epochs if e.step < step]
            self.from_callbacks = [e for e in self.from_callbacks if e.step < step]
            self.media = [e for e in self.media if e.step < step]

    @property
    def losses(self) -> list[float]:
        """The training loss of every step."""
        return [record.loss for record in self.steps]

    def logged(self, name: str) -> list[float]:
        """What was logged under ``name``, step by step; see ``paceline.log``."""
        by_step = {record.step: record.values[name] for record in self._from_callbacks_of(name)}
        by_step |= {r.step: r.logged[name] for r in self.steps if name in r.logged}
        return [by_step[step] for step in sorted(by_step)]

    def _from_callbacks_of(self, name: str) -> list[Logged]:
        """The values of ``name`` that callbacks have logged, with their steps."""
        return [record for record in self.from_callbacks if name in record.values]

    def metric(self, name: str = "loss") -> list[float]:
        """A validation metric, evaluation by evaluation."""
        return [record.metrics[name] for record in self.evals if name in record.metrics]

    @property
    def val_loss(self) -> float | None:
        """The last validation loss, if there was one."""
        values = self.metric("loss")
        return values[-1] if values else None

    def best(
        self, metric: str = "loss", mode: Literal["min", "max"] | None = None
    ) -> EvalDone | None:
        """The evaluation with the best value of ``metric``; ``None`` where there was no evaluation.

            history.best("accuracy").step

        Less is better of a loss or an error, more of an accuracy and the like; of a metric whose
        name does not say it, ``mode`` is ``"min"`` or ``"max"``. Of equal ones the first counts,
        and none that is not finite.
        """
        self._check_is_measured(metric)
        wanted = direction(metric, mode or known_direction(metric), f"History.best({metric!r})")
        if wanted not in ("min", "max"):
            raise TrainingError(f"History.best: mode={mode!r} must be 'min' or 'max'.")
        found = [e for e in self.evals if math.isfinite(e.metrics.get(metric, math.nan))]
        pick = min if wanted == "min" else max
        return pick(found, key=lambda e: e.metrics[metric], default=None)

    def _check_is_measured(self, metric: str) -> None:
        """Refuse a metric that no evaluation has; nothing is known before there was one."""
        measured = list(dict.fromkeys(name for record in self.evals for name in record.metrics))
        if not measured or metric in measured:
            return
        near = difflib.get_close_matches(str(metric), measured, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise TrainingError(
            f"History.best({metric!r}): no evaluation has measured it; there are "
            f"{', '.join(measured)}.{hint}"
        )

    @property
    def total_time(self) -> float:
        """Seconds that the run took, evaluations and checkpoints included: ``seconds``."""
        return self.seconds

    @property
    def samples(self) -> int:
        """Training samples consumed."""
        return sum(record.samples for record in self.steps)

    @property
    def samples_per_second(self) -> float:
        """Training throughput over all steps; evaluation and checkpoints not counted."""
        seconds = sum(record.seconds for record in self.steps)
        return self.samples / seconds if seconds else 0.0

    def __repr__(self) -> str:
        loss = f", loss={self.losses[-1]:.4f}" if self.steps else ""
        val = f", val_loss={self.val_loss:.4f}" if self.val_loss is not None else ""
        last = self.steps[-1].step if self.steps else 0
        return f"History({self.reason or 'running'} at step {last}{loss}{val})"


def where_stopped(history: History, run_dir: Path | None) -> str:
    """What to tell the person who pressed Ctrl-C."""
    last = history.steps[-1].step if history.steps else 0
    where = f"stopped {at_step(last)}"
    if run_dir is None:
        return f"{where}; nothing is saved without a run_dir"
    return f"{where}; go on with fit(..., resume=True) on run_dir={str(run_dir)!r}"
