"""Code that looks on while a run trains, and may ask it to stop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import TrainingError
from paceline.events import Note

if TYPE_CHECKING:
    from paceline.engine import StepResult
    from paceline.trainer.history import History
    from paceline.trainer.reporting import Reporter
    from paceline.trainer.trainer import Trainer


class Callback:
    """Override what you need. Every rank calls every method, with the same values.

    ``trainer.step``, ``trainer.epoch`` and ``trainer.engine`` tell where the run is;
    ``trainer.stop()`` on any rank ends the run on all of them after the current step. What
    ``state_dict`` returns is saved with each checkpoint and given back on resume.
    """

    def on_fit_start(self, trainer: Trainer) -> None:
        """Before the first step, after a resume has been loaded."""

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """After each optimizer step."""

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """After each pass over the validation data."""

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        """After the last step of an epoch."""

    def on_checkpoint(self, trainer: Trainer, path: Path | str) -> None:
        """After a checkpoint is complete, some steps later where it is written beside training.

        ``path`` is its folder, or its URL as a string.
        """

    def on_fit_end(self, trainer: Trainer, history: History) -> None:
        """After the last step, evaluation and checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """What has to survive a resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what an earlier ``state_dict`` returned."""


class EarlyStopping(Callback):
    """Stops a run whose ``metric`` has not improved for ``patience`` evaluations.

    A change of ``min_delta`` or less is no improvement; ``mode`` says which way is up.
    """

    def __init__(
        self, metric: str = "loss", *, patience: int = 3, mode: str = "min", min_delta: float = 0.0
    ) -> None:
        if patience < 1:
            raise TrainingError(f"EarlyStopping: patience={patience} must be 1 or more.")
        self.metric = metric
        self.patience = patience
        self.min_delta = min_delta
        self._sign = sign_of(mode)
        self.best = math.inf
        self.waited = 0

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Compare with the best so far."""
        value = self._sign * value_of(metrics, self.metric, "EarlyStopping")
        if value < self.best - self.min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            trainer.stop(
                f"{self.metric} has not improved for {self.waited} evaluations "
                f"(best {self._sign * self.best:.4f})"
            )

    def state_dict(self) -> dict[str, Any]:
        """The best value and how long ago it was."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting."""
        self.best, self.waited = state["best"], state["waited"]


class CallbackStates:
    """What the callbacks save, each under its kind."""

    def __init__(self, callbacks: Sequence[Callback], reporter: Reporter) -> None:
        self._callbacks, self._reporter = callbacks, reporter

    def state_dict(self) -> list[tuple[str, dict[str, Any]]]:
        """Of each callback, in their order."""
        return [(type(one).__qualname__, one.state_dict()) for one in self._callbacks]

    def load_state_dict(self, states: list[tuple[str, dict[str, Any]]]) -> None:
        """Give each callback the state of the first of its kind that no other has taken."""
        left = list(states)
        for callback in self._callbacks:
            kind = type(callback).__qualname__
            found = next((entry for entry in left if entry[0] == kind), None)
            if found is not None:
                left.remove(found)
                callback.load_state_dict(found[1])
        if lost := [kind for kind, saved in left if saved]:
            self._reporter.emit(
                Note(
                    level="warning",
                    message=f"the checkpoint holds the state of callbacks that this run does not "
                    f"have: {', '.join(lost)}",
                )
            )


def sign_of(mode: str) -> int:
    """1 where smaller is better, -1 where larger is."""
    if mode not in ("min", "max"):
        raise TrainingError(f"mode={mode!r} must be 'min' (smaller is better) or 'max'.")
    return 1 if mode == "min" else -1


def value_of(metrics: Mapping[str, float], name: str, who: str) -> float:
    """The metric ``name``, or an error that lists what there is."""
    if name not in metrics:
        raise TrainingError(
            f"{who} watches the metric {name!r}, but the evaluation gave {', '.join(metrics)}."
        )
    return metrics[name]
