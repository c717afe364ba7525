"""What a trainer is made of, and where its run is: what its loop, saves and ranks work with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.saveable import Stateful
from paceline.engine import Engine
from paceline.engine.arguments import OptimizerFactory
from paceline.engine.loss import LossFunction
from paceline.errors import TrainingError
from paceline.layout.batch import BatchSizes
from paceline.log_values import Reduce
from paceline.options import (
    Checkpointing,
    DataOptions,
    EngineOptions,
    Evaluation,
    Pipelining,
    Reduction,
    Sharding,
    TensorParallel,
)
from paceline.options.habits.attributes import missing_attribute
from paceline.track import Tracker
from paceline.trainer.callbacks import Callback
from paceline.trainer.evaluate import Metric
from paceline.trainer.media import MediaWriter
from paceline.trainer.stop_requests import LEAVE, STOP, StopRequests
from paceline.world import World

_ALONE: dict[str, Any] = {
    "layout": "dp=1",
    "sharding": Sharding(),
    "tensor": TensorParallel(),
    "pipeline": Pipelining(),
    "compress": None,
    "local_steps": None,
    "reduction": Reduction(),
}
"""The options of an engine that has no other ranks, where those of a layout would mean nothing."""


class TrainerBase:
    """A trainer without its verbs; see ``paceline.Trainer``."""

    model: nn.Module
    loss: LossFunction | None
    optimizer: Optimizer | OptimizerFactory | None
    engine_options: EngineOptions
    batch: BatchSizes
    global_batch: int | None
    run_dir: Path | None
    shown_dir: Path | None
    """The run's folder as the user wrote it."""
    seed: int
    metrics: dict[str, Metric]
    callbacks: list[Callback]
    trackers: list[Tracker]
    progress: bool
    data: DataOptions
    evaluation: Evaluation
    checkpoint: Checkpointing
    timeout: float | None
    measure_memory: bool
    split_every: int | None
    objects: dict[str, Stateful]
    events_dir: Path | None
    """Where this rank writes events; ``fit(nproc=…)`` sets it where there is no ``run_dir``."""

    def __init__(self) -> None:
        # Whether somebody else follows the events and shows them: a launcher, or fit(nproc=…).
        self.events_are_shown = False
        # Where an evaluation or a prediction by itself reports: no part of the run's own events.
        self.pass_events_dir: Path | None = None
        # Seconds from a signal until a launcher ends the ranks, where one has told.
        self.grace: float | None = None
        # Called on each rank when all of them have done a first step with their settings.
        self.when_accepted: Callable[[], None] | None = None
        # What fit was asked for: epochs, steps.
        self.length: tuple[int | None, int | None] = (None, None)
        self.epoch = 0
        self._engine: Engine | None = None
        # The state of an engine that ranks of fit(nproc=…) had; the model has its own already.
        self._brought: dict[str, Any] | None = None
        # For ranks that evaluate or predict: the averaged weights, whole.
        self.averages: dict[str, Tensor] | None = None
        # Whether all ranks came to the end of fit together, a signal or not.
        self.left_in_order = False
        self._stops: StopRequests | None = None
        self._media: MediaWriter | None = None
        self._has_fitted = False

    if not TYPE_CHECKING:  # a type checker knows which attributes there are

        def __getattr__(self, name: str) -> Any:
            return missing_attribute(self, "Trainer", name)

    @property
    def engine(self) -> Engine:
        """The engine, once ``fit`` has built it.

        After ``fit(nproc=…)``, whose ranks are gone, it is one of this process alone that goes on
        from what they had; it is made when it is first asked for.
        """
        if self._engine is None:
            if self._brought is None:
                raise TrainingError("the trainer has no engine before fit() is called.")
            self._engine = self._engine_alone(self._brought)
            self._brought = None
        return self._engine

    @property
    def has_engine(self) -> bool:
        """Whether ``engine`` is there already."""
        return self._engine is not None

    def take_over(self, state: dict[str, Any], epoch: int) -> None:
        """Go on from the engine ``state`` that ranks had; model and optimizer have it already."""
        self._engine, self._brought, self.epoch = None, state, epoch

    def for_ranks(self, *, events_are_shown: bool) -> Self:
        """A copy to send to ranks: they write events, and whoever started them shows those."""
        copied = copy.copy(self)
        copied.trackers, copied.progress = [], False
        copied.events_are_shown = events_are_shown
        copied._engine = copied._brought = None
        return copied

    def _engine_alone(self, state: Mapping[str, Any]) -> Engine:
        options = replace(self.engine_options, **_ALONE)
        engine = Engine(
            self.model,
            optimizer=self.optimizer,
            loss=self.loss,
            world=World.init(timeout=self.timeout),
            **options.arguments(),
        )
        weights = engine.model.state_dict()
        engine.load_state_dict({**state, "model": weights, "compress": None, "reduction": None})
        self.model, self.optimizer = engine.model, engine.optimizer
        return engine

    @property
    def step(self) -> int:
        """How many optimizer steps the run has done."""
        if self._brought is not None:
            return int(self._brought["step"])
        return 0 if self._engine is None else self._engine.steps_done

    def log(
        self,
        name: str,
        value: Any,
        *,
        count: int | Tensor | None = None,
        reduce: Reduce = "mean",
    ) -> None:
        """Log a number from a callback, on every rank; it belongs to the step done last.

        Inside a model or a loss it is ``paceline.log``.
        """
        self.engine.log(name, value, count=count, reduce=reduce)

    def log_image(self, name: str, image: Any, *, caption: str = "") -> None:
        """Log an image from a callback, for trackers that show it; that of rank 0 is taken.

        ``image`` is a tensor of channels × height × width (1, 3 or 4 channels) or height × width,
        an array with the channels last, or a PIL image. Floats go from 0, black, to 1.

        It is written to ``media/`` in the run's folder, and belongs to the step done last. Other
        ranks may call it, or not.
        """
        self._media_writer("log_image").image(name, image, caption)

    def log_text(self, name: str, text: str) -> None:
        """Log a text from a callback, such as what a model has written; see ``log_image``."""
        self._media_writer("log_text").text(name, text)

    def log_histogram(
        self, name: str, values: Any, *, bins: int = 64, gather: bool = False
    ) -> None:
        """Log how the numbers in a tensor are distributed, in ``bins`` of equal width.

        Those of rank 0 are counted; with ``gather`` those of all ranks together, and then every
        rank calls it. Every rank also calls it for a tensor that is split over ranks (a parameter
        under ``zero`` or ``tp``), of which the whole is counted. See ``log_image``.
        """
        self._media_writer("log_histogram").histogram(name, values, bins, gather)

    def _media_writer(self, call: str) -> MediaWriter:
        if self._media is None:
            raise TrainingError(
                f"{call}: no run is under way. Call it during fit, from a callback such as "
                "on_step_end or on_eval_end."
            )
        return self._media

    def stop(self, reason: str = "") -> None:
        """Ask, from a callback on any rank, that the run ends after the current step.

        Rank 0 reports its ``reason``.
        """
        if self._stops is not None:
            self._stops.ask(STOP, reason)

    def interrupt(self) -> None:
        """Ask, from any thread of any rank, that the run saves and leaves, as SIGTERM does.

        Where signals cannot reach: in a thread, or on another machine.
        """
        if self._stops is not None:
            self._stops.ask(LEAVE)

    @property
    def checkpoint_dir(self) -> str | None:
        """Where checkpoints go, a path or a URL; ``None`` when the run keeps nothing on disk."""
        where = self.checkpoint.where
        if self.run_dir is None:
            return where
        if where is not None and "://" in where:
            return where
        return str(self.run_dir / (where or "checkpoints"))
