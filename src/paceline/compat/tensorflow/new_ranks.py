"""``TensorFlowTrainer.fit(nproc=N)``: a plain script or a notebook brings up its own workers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Protocol, Self

from paceline.compat.tensorflow.library import (
    KERAS_3_FAILS,
    LEGACY_KERAS,
    is_installed,
    keras_of,
    prefer_legacy_keras,
)
from paceline.errors import MissingExtra, TrainingError
from paceline.events import FILE_NAME
from paceline.launch import local
from paceline.launch.restart_policy import RestartLimits
from paceline.track import Progress, Tracker, following
from paceline.trainer.history import History, where_stopped


class SendableTrainer(Protocol):
    """What is sent to new ranks, and takes over what they learned."""

    model: Any
    strategy: Any
    optimizer: Any
    loss: Any
    metrics: Any
    keras_callbacks: list[Any]
    trackers: list[Tracker]
    progress: bool
    run_dir: Path | None
    events_dir: Path | None
    built_model: Any
    built_strategy: Any
    brought_weights: list[Any] | None
    step: int
    epoch: int

    def for_ranks(self, *, events_are_shown: bool) -> Self:
        """A copy to send to ranks."""


def fit_on_new_ranks(
    trainer: SendableTrainer,
    fit_here: Callable[..., History],
    asked: tuple[Any, ...],
    *,
    nproc: int,
    max_restarts: int | None,
) -> History:
    """Train on ``nproc`` new workers; ``trainer`` ends up with what they learned."""
    check_can_be_sent(trainer, asked, nproc)
    prefer_legacy_keras()
    trackers = [*trainer.trackers, *([Progress()] if trainer.progress else [])]
    restarts = (0 if trainer.run_dir is None else 3) if max_restarts is None else max_restarts
    with tempfile.TemporaryDirectory(prefix="paceline-events-") as temporary:
        rank_trainer = trainer.for_ranks(events_are_shown=bool(trackers))
        events_dir = trainer.run_dir or Path(temporary)

        def on_each_rank() -> tuple[History, Any, int, int]:
            rank_trainer.events_dir = events_dir
            history = fit_here(rank_trainer, *asked)
            weights = rank_trainer.built_model.get_weights()  # every rank: some are means over them
            return history, weights, rank_trainer.step, rank_trainer.epoch

        with following(events_dir, trackers):
            try:
                found = local.call(
                    on_each_rank,
                    nproc=nproc,
                    log_dir=None if trainer.run_dir is None else trainer.run_dir / "logs",
                    events_dir=events_dir,
                    limits=RestartLimits(max_restarts=restarts),
                    env={LEGACY_KERAS: os.environ.get(LEGACY_KERAS, "1")},
                )
            except KeyboardInterrupt:
                begun = (events_dir / FILE_NAME).exists()
                so_far = History.read(events_dir) if begun else History()
                raise KeyboardInterrupt(where_stopped(so_far, trainer.run_dir)) from None
    history, trainer.brought_weights, trainer.step, trainer.epoch = found
    trainer.built_model = trainer.built_strategy = None
    trainer.strategy = "auto"  # the workers are gone
    result: History = history
    return result


def check_can_be_sent(trainer: SendableTrainer, asked: tuple[Any, ...], nproc: int) -> None:
    """Refuse, before anything is started, what new processes could not train."""
    if keras_of(trainer.model) is not None:
        raise TrainingError(
            f"fit(nproc={nproc}): each worker builds the model itself, so give a function that "
            "builds it: TensorFlowTrainer(build_model, …)."
        )
    if trainer.strategy not in ("auto", "multi_worker"):
        shown = (
            trainer.strategy if isinstance(trainer.strategy, str) else "a tf.distribute.Strategy"
        )
        raise TrainingError(
            f"fit(nproc={nproc}) trains with strategy='multi_worker', not {shown!r}. Leave "
            "strategy out, or nproc."
        )
    for name, given in (("train", asked[0]), ("val", asked[1])):
        if type(given).__module__.startswith("tensorflow."):
            raise TrainingError(
                f"fit(nproc={nproc}): {name} is a {type(given).__name__}, which cannot be sent to "
                "other processes. Give NumPy arrays, or a function that makes the dataset."
            )
    if not is_installed("tf_keras"):
        raise MissingExtra(f"tf_keras ({KERAS_3_FAILS})", "tensorflow")
    for part in (trainer.model, trainer.optimizer, trainer.loss, trainer.metrics):
        if isinstance(part, FunctionType) and (used := _keras_3_in(part)):
            raise TrainingError(
                f"fit(nproc={nproc}): {part.__name__}() uses {used!r}, which is Keras 3: "
                f"{KERAS_3_FAILS}. Use tf.keras in it, or import tf_keras as keras."
            )
    given = [*trainer.keras_callbacks, trainer.optimizer, trainer.loss]
    for part in given:
        if type(part).__module__.partition(".")[0] == "keras":
            raise TrainingError(
                f"fit(nproc={nproc}): {type(part).__name__} is one of Keras 3: {KERAS_3_FAILS}. "
                f"Set {LEGACY_KERAS}=1 before TensorFlow is imported, or import tf_keras as keras."
            )


def _keras_3_in(function: FunctionType) -> str | None:
    """The name under which ``function`` uses a module or class of Keras 3."""
    for name, value in _used(function):
        module = (
            value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
        )
        if str(module).partition(".")[0] == "keras":
            return name
    return None


def _used(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        yield name, cell.cell_contents
