"""The trainer: an engine plus data, evaluation, checkpoints, trackers and a stopping rule."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Never

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.checkpoints import Checkpoints
from paceline.checkpoint.saveable import Stateful, checked_objects
from paceline.data import Loader, sizes_over
from paceline.engine import Engine
from paceline.engine.arguments import LRSchedule, OptimizerFactory, check_arguments
from paceline.engine.checks import check_rules_match
from paceline.engine.freezing import Freezing
from paceline.engine.learning_rate import say_what_it_counts
from paceline.engine.loss import LossFunction
from paceline.errors import TrainingError
from paceline.events import FILE_NAME, Note
from paceline.launch.environment import read_environment
from paceline.launch.job import check_nproc
from paceline.launch.restart_policy import RestartLimits
from paceline.layout import Layout
from paceline.layout.batch import BatchSizes
from paceline.options import (
    EMA,
    Checkpointing,
    Compression,
    DataOptions,
    EngineOptions,
    Evaluation,
    LocalSteps,
    LossScaling,
    Pipelining,
    Recompute,
    Reduction,
    Sharding,
    TensorParallel,
    TrainerOptions,
)
from paceline.options.arguments import refuse_unknown
from paceline.options.engine import InitialWeights, Nonfinite, Randomness
from paceline.options.engine import Precision as PrecisionName
from paceline.options.rules import layout_in_world
from paceline.parallel.device_map import DeviceLike
from paceline.track import Tracker
from paceline.trainer.arguments import (
    Resume,
    check_folder,
    check_length,
    check_looking_on,
    check_restarts,
    check_run_dir,
    check_uses_of_val,
)
from paceline.trainer.callbacks import Callback
from paceline.trainer.evaluate import Metric
from paceline.trainer.fit_data import (
    check_batch_is_stated,
    check_data,
    engine_options,
    expect_all_ranks,
    make_loader,
    total_steps,
)
from paceline.trainer.fit_processes import fit_on_new_ranks
from paceline.trainer.history import History, where_stopped
from paceline.trainer.inference import InferenceTrainer
from paceline.trainer.loop import Loop
from paceline.trainer.media import MediaWriter
from paceline.trainer.reporting import Reporter
from paceline.trainer.stop_requests import StopRequests
from paceline.trainer.weights import load_weights
from paceline.world import World


class Trainer(InferenceTrainer):
    """Trains a model on a dataset, on whatever world it is started in; evaluates and predicts.

    ``model``, ``loss``, ``optimizer`` and what is not listed here (``layout``, ``precision``,
    ``clip_norm``, …) are those of ``paceline.Engine``.

    Args:
        global_batch: Samples per optimizer step, over all ranks. In Python not needed where the
            data is a torch DataLoader, whose batch size it then is.
        per_device_batch: Instead of global_batch: samples per forward pass on one rank.
            global_batch is then per_device_batch × data-parallel ranks × accumulate. A run that
            is resumed on another number of ranks keeps the global batch it began with.
        accumulate: Forward passes whose gradients make one step, on each rank.
        run_dir: The run's folder for events and checkpoints. None keeps nothing on disk.
        seed: The seed of the order of samples, of dropout and of everything else that is
            random.
        metrics: Validation metrics by name, called as metric(output, target) on each batch and
            returning its mean over the samples or a pair (sum, count); or paceline.WholeSet for
            metrics that need everything at once, or a metric of torchmetrics.
        callbacks: Code called during the run: paceline.Callback.
        trackers: Readers of the run's events, such as those in paceline.track.
        progress: Show a progress bar, or lines where the output is not a terminal.
        data: How batches are drawn.
        evaluation: When to evaluate.
        checkpoint: What is saved and kept.
        timeout: Seconds a rank waits for the others before giving up. In Python None: 300.
        measure_memory: Measure the second step, and report the bytes on each rank as an event.
        split_every: Every this many steps, report where each rank's time went, and who is slow,
            as events. None: never.
        objects: By name, anything else to save and restore: it needs state_dict and
            load_state_dict.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Optimizer | OptimizerFactory | None = None,
        loss: LossFunction | None = None,
        global_batch: int | None = None,
        per_device_batch: int | None = None,
        accumulate: int | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        seed: int = 0,
        metrics: Mapping[str, Metric] | None = None,
        callbacks: Sequence[Callback] = (),
        trackers: Sequence[Tracker] = (),
        progress: bool = True,
        data: DataOptions = DataOptions(),
        evaluation: Evaluation = Evaluation(),
        checkpoint: Checkpointing = Checkpointing(),
        timeout: float | None = None,
        measure_memory: bool = False,
        split_every: int | None = 50,
        objects: Mapping[str, Stateful] | None = None,
        layout: str | Layout = "auto",
        microbatch: int | None = None,
        precision: PrecisionName = "fp32",
        loss_scaling: LossScaling | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        schedule: LRSchedule | None = None,
        compile: bool = False,
        nonfinite: Nonfinite = "stop",
        sync_batchnorm: bool = False,
        freeze: str | Sequence[str] | None = None,
        unfreeze_at: Mapping[str, int] | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        count: Callable[[Any], int | Tensor] | None = None,
        sharding: Sharding | None = None,
        tensor: TensorParallel | None = None,
        pipeline: Pipelining | None = None,
        checkpoint_activations: Recompute | str | int | None = None,
        device_map: str | Mapping[str, DeviceLike] | None = None,
        max_memory: Mapping[DeviceLike, int | str] | None = None,
        init: Callable[[nn.Module], None] | None = None,
        compress: Compression | str | None = None,
        local_steps: LocalSteps | int | None = None,
        reduction: Reduction | None = None,
        ema: EMA | float | None = None,
        initial_weights: InitialWeights = "rank0",
        randomness: Randomness = "layout-free",
        **unknown: Never,
    ) -> None:
        refuse_unknown(Trainer, unknown, beside=Trainer.fit)
        check_arguments(model, loss, optimizer, may_only_predict=True)
        self.engine_options = EngineOptions.of(
            layout=layout,
            microbatch=microbatch,
            precision=precision,
            loss_scaling=loss_scaling,
            clip_norm=clip_norm,
            clip_value=clip_value,
            schedule=schedule,
            compile=compile,
            nonfinite=nonfinite,
            sync_batchnorm=sync_batchnorm,
            freeze=freeze,
            unfreeze_at=unfreeze_at,
            forward=forward,
            count=count,
            sharding=sharding,
            tensor=tensor,
            pipeline=pipeline,
            checkpoint_activations=checkpoint_activations,
            device_map=device_map,
            max_memory=max_memory,
            init=init,
            compress=compress,
            local_steps=local_steps,
            reduction=reduction,
            ema=ema,
            initial_weights=initial_weights,
            randomness=randomness,
        )
        say_what_it_counts(schedule)
        check_looking_on(callbacks, metrics or {}, trackers)
        check_run_dir(run_dir)
        micro = microbatch if accumulate is not None else None
        self.batch = BatchSizes(global_batch, per_device_batch, accumulate, micro)
        TrainerOptions(
            seed=seed,
            progress=progress,
            data=data,
            evaluation=evaluation,
            checkpoint=checkpoint,
            timeout=timeout,
            measure_memory=measure_memory,
            split_every=split_every,
        )
        super().__init__()
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.global_batch = global_batch
        # Absolute: a run stays in its folder when the program changes directory.
        self.run_dir = None if run_dir is None else Path(run_dir).absolute()
        self.shown_dir = None if run_dir is None else Path(run_dir)
        self.seed = seed
        self.metrics = dict(metrics or {})
        self.callbacks, self.trackers = list(callbacks), list(trackers)
        self.progress = progress
        self.data, self.evaluation, self.checkpoint = data, evaluation, checkpoint
        self.timeout = timeout
        self.measure_memory, self.split_every = measure_memory, split_every
        self.objects = dict(checked_objects({} if objects is None else objects))
        self.events_dir = self.run_dir

    def fit(
        self,
        train: Any,
        val: Any = None,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        nproc: int | None = None,
        resume: Resume = False,
        max_restarts: int | None = None,
        **unknown: Never,
    ) -> History:
        """Train on ``train`` for ``epochs`` or ``steps``, evaluating on ``val``.

        Both may be a dataset, a torch ``DataLoader`` or a ``paceline.data.Loader``. Started
        by a launcher, the process joins its world; started by hand it trains alone, or with
        ``nproc`` brings up that many ranks, waits for them, and takes over what they learned. Ranks
        that die, or hang, are then started again up to ``max_restarts`` times in a row, from the
        newest state of the run (``None``: 3 times where there is a ``run_dir``, else never).

        ``resume`` goes on from the newest checkpoint in ``run_dir`` (from the beginning where
        there is none). ``resume="best"``, or the number of a step, goes back to that checkpoint:
        those of later steps are moved into ``set-aside-1`` beside it, and the run trains as if it
        had never been further (see ``Checkpoints.restore``).

        Ctrl-C or SIGTERM on any rank ends the run after the current step on all of them, saves a
        checkpoint where there is a ``run_dir``, and raises ``KeyboardInterrupt``, or after SIGTERM
        ``SystemExit`` (143 where the signal came, 75 on the other ranks).
        """
        refuse_unknown(Trainer.fit, unknown, beside=Trainer)
        check_data(train, val)
        check_length(epochs, steps)
        if self.optimizer is None:
            raise TrainingError(
                "fit: this trainer was made without an optimizer, to evaluate and predict. Pass "
                "optimizer= to the Trainer, such as torch.optim.AdamW(model.parameters())."
            )
        resume = False if resume is None else resume
        check_folder(self, resume)
        check_uses_of_val(self, val)
        check_restarts(max_restarts)
        if nproc is not None and read_environment() is None:
            check_nproc(nproc)
            self._check_layout(nproc, train, val, goes_on=resume is not False)
            if nproc == 1:
                return self._fit_here(train, val, epochs, steps, resume)
            if max_restarts is None:
                max_restarts = 0 if self.run_dir is None else 3
            return fit_on_new_ranks(
                self,
                Trainer._fit_here,
                train,
                val,
                epochs=epochs,
                steps=steps,
                nproc=nproc,
                resume=resume,
                limits=RestartLimits(max_restarts=max_restarts),
            )
        world = World.init(timeout=self.timeout)
        if nproc is not None and nproc != world.size:
            raise TrainingError(
                f"fit(nproc={nproc}) was called in a world of {world.size} ranks that a launcher "
                f"started. Leave nproc out, or start {nproc} ranks."
            )
        return self._fit_here(train, val, epochs, steps, resume)

    def _check_layout(self, nproc: int, train: Any, val: Any, *, goes_on: bool) -> None:
        """What can be said of the layout and the batch on it before any rank is started."""
        options = self.engine_options
        layout = layout_in_world(options, nproc)
        check_rules_match(self.model, options.compress)
        Freezing(self.model, options)
        check_batch_is_stated(self.batch, train, "train")
        check_batch_is_stated(self.batch, val, "val")
        if not isinstance(train, Loader):
            sizes_over(train, self.batch).on(layout.dp, exact=not goes_on)

    def _fit_here(
        self, train: Any, val: Any, epochs: int | None, steps: int | None, resume: Resume
    ) -> History:
        """``fit`` on this rank."""
        self.length = (epochs, steps)
        self._brought, self.left_in_order = None, False
        world = World.init(timeout=self.timeout)
        if not self.model.training:
            self.model.train()
        world.seed(self.seed)
        restarted = world.restart_count > 0
        options = engine_options(self, train, world, goes_on=resume is not False or restarted)
        # One that has only evaluated or predicted so far goes on to train.
        engine = None if self._has_fitted else self._engine
        if engine is None or engine.world is not world or engine.options != options:
            engine = Engine(
                self.model,
                optimizer=self.optimizer,
                loss=self.loss,
                world=world,
                **options.arguments(),
            )
        self._engine, self._has_fitted = engine, True
        self.model, self.optimizer = engine.model, engine.optimizer
        train_loader = make_loader(self, train, "train")
        val_loader = None if val is None else make_loader(self, val, "val")
        expect_all_ranks(train_loader, val_loader, alone=options.local_steps is not None)
        goes_on = self.checkpoint_dir is not None and (resume is not False or restarted)
        reporter = self._reporter(world, goes_on)
        checkpoints = self._checkpoints(reporter, train_loader)
        clean = False
        with StopRequests(world) as stops:
            self._stops = stops
            self._media = MediaWriter(
                self.events_dir, world, lambda: engine.steps_done, reporter.emit
            )
            reporter.files = self._media.root
            loop = Loop(
                self,
                train_loader,
                val_loader,
                total_steps=total_steps(train_loader, epochs, steps),
                epochs=epochs,
                reporter=reporter,
                stops=stops,
                checkpoints=checkpoints,
            )
            try:
                self._load_start(loop, checkpoints if goes_on else None, resume, restarted)
                self._tell_batch(loop, train_loader, val_loader)
                history = loop.run()
                clean = True
            finally:
                media, self._stops, self._media = self._media, None, None
                if checkpoints is not None:
                    # Where the run fails, a save may still be on its way; it counts all the same.
                    loop.saves.tell(wait=True)
                    checkpoints.close(clean=clean)
                reporter.close()
                media.close()
                train_loader.close()
                if val_loader is not None:
                    val_loader.close()
        self.left_in_order = True
        if history.reason == "interrupted":
            stops.leave(where_stopped(history, self.run_dir))
        return history

    def _tell_batch(self, loop: Loop, train: Loader, val: Loader | None) -> None:
        """What there is to say of the batch size, as an event; of the validation data, nothing."""
        if val is not None:
            val.take_note()
        if (note := train.take_note()) is not None:
            loop.reporter.emit(Note(message=note))
            if loop.epochs is not None:  # a resume may have brought another global batch
                loop.total_steps = total_steps(train, loop.epochs, None)

    def _checkpoints(self, reporter: Reporter, train: Loader) -> Checkpoints | None:
        if self.checkpoint_dir is None:
            return None
        try:
            return Checkpoints(
                self.checkpoint_dir,
                self.engine,
                loader=train,
                objects=self.objects,
                options=self.checkpoint,
                report=reporter.emit,
            )
        except BaseException:  # nothing runs that would close it
            reporter.close()
            raise

    def _load_start(
        self, loop: Loop, checkpoints: Checkpoints | None, resume: Resume, restarted: bool
    ) -> None:
        """Give the model what the run starts from: one of ``checkpoints``, or weights."""
        went_on = False
        if checkpoints is not None:
            went_on = self._resume(loop, checkpoints, resume)
        elif restarted:
            told = "without a run_dir nothing was saved: the run starts from the beginning"
            loop.reporter.emit(Note(message=told, level="warning"))
        start, key = self.checkpoint.start_from, self.checkpoint.digest_key
        if start is not None and not went_on:
            path = load_weights(self.engine, start, key=key)
            loop.reporter.emit(Note(message=f"starting with the weights of {path}"))

    def _resume(self, loop: Loop, checkpoints: Checkpoints, resume: Resume) -> bool:
        restored = checkpoints.restore(None if isinstance(resume, bool) else resume)
        if restored is not None:
            loop.went_on(restored)
            return True
        where = f"{checkpoints.folder.where} holds no checkpoint"
        loop.reporter.emit(Note(message=f"{where}: the run starts from the beginning"))
        return False

    def _reporter(self, world: World, resumed: bool) -> Reporter:
        history = History()
        if resumed and self.run_dir is not None and (self.run_dir / FILE_NAME).exists():
            history = History.read(self.run_dir)
            history.reason = ""
        trackers = list(self.trackers)
        if self.progress and world.is_main:
            from paceline.track import Progress

            trackers.append(Progress())
        try:
            warns = not (trackers or self.events_are_shown)
            return Reporter(self.events_dir, trackers, history, main=world.is_main, warns=warns)
        except OSError as error:
            raise TrainingError(
                f"cannot write events to {self.events_dir}: {error}. Choose another run_dir."
            ) from error
