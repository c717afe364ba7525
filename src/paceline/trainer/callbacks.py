"""Code called during a run, which may ask it to stop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never

from paceline.errors import CheckpointError, TrainingError
from paceline.events import Note
from paceline.options.arguments import refuse_unknown
from paceline.options.checkpointing import direction
from paceline.trainer.saved_fields import Fits, is_count, is_number, known_fields

if TYPE_CHECKING:
    from paceline.engine import StepResult
    from paceline.trainer.history import History
    from paceline.trainer.reporting import Reporter


class Callback:
    """Override what you need. Every rank calls every method, with the same values.

    ``trainer`` is the ``paceline.Trainer``: its ``step``, ``epoch`` and ``engine`` say where
    the run is, and ``trainer.stop()`` on any rank ends the run on all of them after the current
    step. What ``state_dict`` returns is saved with each checkpoint and given back on resume.
    """

    def on_fit_start(self, trainer: Any) -> None:
        """Before the first step, after a resume has been loaded."""

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        """After each optimizer step."""

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """After each pass over the validation data."""

    def on_epoch_end(self, trainer: Any, epoch: int) -> None:
        """After the last step of an epoch."""

    def on_checkpoint(self, trainer: Any, path: Path | str) -> None:
        """After a checkpoint is complete, some steps later where it is written beside training.

        ``path`` is its folder, or its URL as a string.
        """

    def on_fit_end(self, trainer: Any, history: History) -> None:
        """After the last step, evaluation and checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """What has to survive a resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what an earlier ``state_dict`` returned."""


def _is_length(value: Any) -> bool:
    return value is None or (
        isinstance(value, list)
        and len(value) == 2
        and all(number is None or is_count(number) for number in value)
    )


_EARLY_STOPPING: dict[str, Fits] = {
    "best": is_number,
    "waited": is_count,
    "stopped_length": _is_length,
}


class EarlyStopping(Callback):
    """Stops a run whose ``metric`` has not improved for ``patience`` evaluations.

    A change of ``min_delta`` or less is no improvement; ``mode`` says which way is up
    (``min`` or ``max``; a loss needs none). A run that
    it has stopped stays stopped when it is resumed, unless ``patience`` or the run's length
    (``epochs``, ``steps``) is raised; a longer run has all of its patience again.
    """

    def __init__(
        self,
        metric: str = "loss",
        *,
        patience: int = 3,
        mode: Literal["min", "max"] | None = None,
        min_delta: float = 0.0,
        **unknown: Never,
    ) -> None:
        refuse_unknown(EarlyStopping, unknown)
        if patience < 1:
            raise TrainingError(f"EarlyStopping: patience={patience} must be 1 or more.")
        self.metric = metric
        self.patience = patience
        self.min_delta = min_delta
        self._sign = sign_of(direction(metric, mode, "EarlyStopping"))
        self.best = math.inf
        self.waited = 0
        self._stopped_length: tuple[int | None, int | None] | None = None

    def on_fit_start(self, trainer: Any) -> None:
        """A run that was stopped, and is resumed with nothing changed, has nothing left to do."""
        length, self._stopped_length = self._stopped_length, None
        if trainer.step == 0 or length is None or self.waited < self.patience:
            return
        if is_longer(trainer.length, length):
            self.waited = 0
        else:
            self._stop(trainer)

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Compare with the best so far."""
        value = self._sign * value_of(metrics, self.metric, "EarlyStopping")
        if value < self.best - self.min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            self._stop(trainer)

    def _stop(self, trainer: Any) -> None:
        self._stopped_length = trainer.length
        trainer.stop(
            f"{self.metric} has not improved for {self.waited} evaluations "
            f"(best {self._sign * self.best:.4f})"
        )

    def state_dict(self) -> dict[str, Any]:
        """The best value and how long ago it was; the length of the run that it stopped."""
        length = self._stopped_length
        return {
            "best": self.best,
            "waited": self.waited,
            "stopped_length": None if length is None else list(length),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting."""
        found = known_fields(state, _EARLY_STOPPING, "callback EarlyStopping")
        self.best = found.get("best", math.inf)
        self.waited = found.get("waited", 0)
        length = found.get("stopped_length")
        self._stopped_length = None if length is None else (length[0], length[1])


class CallbackStates:
    """What the callbacks save, each under its kind."""

    def __init__(self, callbacks: Sequence[Callback], reporter: Reporter) -> None:
        self._callbacks, self._reporter = callbacks, reporter

    def state_dict(self) -> list[tuple[str, dict[str, Any]]]:
        """Of each callback, in their order."""
        return [(type(one).__qualname__, one.state_dict()) for one in self._callbacks]

    def load_state_dict(self, states: Any) -> None:
        """Give each callback the state of the first of its kind that no other has taken."""
        if not isinstance(states, list) or not all(map(_is_state, states)):
            raise CheckpointError(
                "the checkpoint's state of the callbacks is not a list of names with their "
                "states: it was changed since it was saved. Resume from another checkpoint."
            )
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


def _is_state(entry: Any) -> bool:
    return isinstance(entry, tuple | list) and len(entry) == 2 and isinstance(entry[0], str)


def is_longer(length: tuple[int | None, int | None], before: tuple[int | None, int | None]) -> bool:
    """Whether a run of ``length`` (epochs, steps) goes beyond one of the length ``before``.

    Epochs and steps are not compared with each other: another unit is a new wish.
    """
    pairs = list(zip(length, before, strict=True))
    if any((new is None) != (old is None) for new, old in pairs):
        return True
    return any(new > old for new, old in pairs if new is not None and old is not None)


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
