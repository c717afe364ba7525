"""What ``Trainer`` and its ``fit`` refuse before anything is built."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint.folder import Folder
from paceline.checkpoint.locate import Which, check_which
from paceline.errors import CheckpointError, ConfigError, TrainingError
from paceline.launch.environment import read_environment
from paceline.launch.run_folder import check_name
from paceline.options.checkpointing import Checkpointing
from paceline.schedules import SteppedSchedule
from paceline.trainer.base import TrainerBase
from paceline.trainer.callbacks import Callback, EarlyStopping, value_of
from paceline.trainer.evaluate import WholeSet
from paceline.trainer.stateful_metrics import has_state


def check_looking_on(callbacks: Any, metrics: Any, trackers: Any) -> None:
    """Refuse callbacks, metrics and trackers that are none."""
    if not isinstance(callbacks, Sequence) or not all(isinstance(c, Callback) for c in callbacks):
        raise TrainingError(
            f"callbacks={callbacks!r} must be a list of paceline.Callback objects, such as "
            "[paceline.EarlyStopping()]."
        )
    if not isinstance(metrics, Mapping):
        raise TrainingError(
            f"metrics must be a dict from name to function, not a {type(metrics).__name__}."
        )
    for name, metric in metrics.items():
        if not isinstance(name, str):
            raise TrainingError(f"metrics: the name {name!r} must be text.")
        if not callable(metric) and not isinstance(metric, WholeSet):
            raise TrainingError(f"metrics: {name!r} must be a function, not {metric!r}.")
    if "loss" in metrics:
        raise TrainingError("metrics: the name 'loss' is taken by the loss itself.")
    can = isinstance(trackers, Sequence) and not isinstance(trackers, str)
    if not can or any(isinstance(t, type) or not hasattr(t, "handle") for t in trackers):
        raise TrainingError(
            f"trackers={trackers!r} must be a list of trackers, such as "
            "[paceline.track.TensorBoard(folder)]."
        )


def check_run_dir(run_dir: Any) -> None:
    """Refuse what is no folder's path, or cannot name a run."""
    if run_dir is None:
        return
    if not isinstance(run_dir, str | os.PathLike) or not str(run_dir):
        raise TrainingError(
            f"run_dir={run_dir!r} must be a folder's path, or None to keep nothing on disk."
        )
    try:
        check_name(run_dir)
    except ConfigError as error:
        raise TrainingError(f"run_dir={os.fspath(run_dir)!r}: {error}") from None


def check_writable(folder: Path) -> None:
    """Refuse a folder that could not be made or written to."""
    existing = next(p for p in (folder, *folder.parents) if os.path.exists(p))
    if not existing.is_dir():
        raise TrainingError(f"run_dir={str(folder)!r}: {existing} is a file. Choose a folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise TrainingError(
            f"run_dir={str(folder)!r}: {existing} cannot be written. Make it writable, or choose "
            "another folder."
        )


def check_length(epochs: int | None, steps: int | None) -> None:
    """Refuse anything but one whole number, of epochs or of steps."""
    if (epochs is None) == (steps is None):
        raise TrainingError(
            f"fit(epochs={epochs}, steps={steps}): give exactly one of epochs and steps."
        )
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None and (
            not isinstance(value, int) or isinstance(value, bool) or value < 1
        ):
            raise TrainingError(f"fit({name}={value!r}): {name} must be a whole number, 1 or more.")


def check_restarts(max_restarts: int | None) -> None:
    """Refuse anything but ``None`` and a whole number from 0 up."""
    whole = isinstance(max_restarts, int) and not isinstance(max_restarts, bool)
    if max_restarts is not None and not (whole and max_restarts >= 0):
        raise TrainingError(
            f"fit: max_restarts={max_restarts!r} must be a whole number, 0 or more."
        )


Resume = bool | Which
"""Whether ``fit`` goes on with the run in its folder; or from which of its checkpoints."""


def check_folder(trainer: TrainerBase, resume: Resume) -> None:
    """Refuse to write over a run: a folder that holds one is continued or left alone."""
    if not isinstance(resume, bool):
        try:
            check_which(resume)
        except CheckpointError:
            raise TrainingError(
                f"fit(resume={resume!r}): it is True, 'best', 'last' or the number of a step; or "
                "False to start anew."
            ) from None
    if trainer.run_dir is None:
        if resume is not False:
            raise TrainingError(f"fit(resume={resume!r}) needs a run_dir to resume from.")
        return
    check_writable(trainer.run_dir)
    restarted = (place := read_environment()) is not None and place.restart_count > 0
    if resume is not False or restarted:
        return
    assert trainer.checkpoint_dir is not None
    folder = Folder(trainer.checkpoint_dir, dict(trainer.checkpoint.storage or {}) or None)
    if folder.checkpoints() or folder.old_format():
        raise CheckpointError(
            f"{folder.where} already holds the checkpoints of a run. Pass resume=True to go "
            "on with it, or choose another run_dir."
        )


def watched_metrics(
    checkpoint: Checkpointing, callbacks: Sequence[Callback], run_dir: Any, val: Any
) -> list[tuple[str, str]]:
    """Who watches which metric of the validation; refused if there is none, or no folder."""
    best = checkpoint.best
    if best is not None and val is None:
        raise TrainingError(
            f"Checkpointing(best={best!r}) needs validation data: pass val to fit()."
        )
    if best is not None and run_dir is None:
        raise TrainingError(f"Checkpointing(best={best!r}) needs a run_dir to save to.")
    watched = [] if best is None else [("Checkpointing(best=)", best)]
    for callback in callbacks:
        if isinstance(callback, EarlyStopping):
            if val is None:
                raise TrainingError("EarlyStopping needs validation data: pass val to fit().")
            watched.append(("EarlyStopping", callback.metric))
    return watched


def check_uses_of_val(trainer: TrainerBase, val: Any) -> None:
    """Refuse what needs validation data, or a metric, that there is none of."""
    watched = watched_metrics(trainer.checkpoint, trainer.callbacks, trainer.run_dir, val)
    schedule = trainer.engine_options.schedule
    if isinstance(schedule, SteppedSchedule) and schedule.metric is not None:
        if val is None:
            raise TrainingError("ReduceLROnPlateau needs validation data: pass val to fit().")
        watched.append(("ReduceLROnPlateau", schedule.metric))
    for who, metric in watched:
        if not _is_of_several(trainer, metric):
            value_of(dict.fromkeys(_measured(trainer), 0.0), metric, who)


def _is_of_several(trainer: TrainerBase, watched: str) -> bool:
    """Whether it is one value of a metric with several, such as a collection of torchmetrics.

    Which values that has, the first evaluation shows.
    """
    plain = watched.removeprefix("ema/") if trainer.engine_options.ema is not None else watched
    return any(has_state(m) and plain.startswith(f"{n}/") for n, m in trainer.metrics.items())


def _measured(trainer: TrainerBase) -> list[str]:
    """The names of what an evaluation measures; models and losses may log more."""
    names = ["loss", *trainer.metrics]
    average = trainer.engine_options.ema
    if average is not None and average.evaluate:
        names += [f"ema/{name}" for name in names]
    return names
