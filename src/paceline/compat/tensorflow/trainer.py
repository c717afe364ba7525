"""``TensorFlowTrainer``: a Keras model with Paceline's runs, events, checkpoints and trackers."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Never, cast

from paceline.checkpoint.checkpoints import Checkpoints
from paceline.checkpoint.locate import Which, find_checkpoint
from paceline.checkpoint.restore import OpenedCheckpoint, fill, on_all_ranks
from paceline.compat.tensorflow.fit_loop import KerasLoop
from paceline.compat.tensorflow.keras_data import Data, IndexedData, make_data
from paceline.compat.tensorflow.keras_state import KerasState, build_optimizer
from paceline.compat.tensorflow.library import (
    import_tensorflow,
    prefer_legacy_keras,
    require_tensorflow,
)
from paceline.compat.tensorflow.new_ranks import fit_on_new_ranks
from paceline.compat.tensorflow.strategies import (
    build_model,
    check_model,
    check_strategy,
    compile_model,
    make_strategy,
)
from paceline.errors import DataError, TrainingError
from paceline.events import FILE_NAME, Note
from paceline.launch.environment import Environment, read_environment
from paceline.launch.job import check_nproc
from paceline.layout import Layout
from paceline.layout.batch import BatchSizes
from paceline.options import Checkpointing, DataOptions
from paceline.options.arguments import refuse_unknown
from paceline.track import Tracker
from paceline.trainer.arguments import (
    Resume,
    check_folder,
    check_length,
    check_looking_on,
    check_restarts,
    check_run_dir,
    watched_metrics,
)
from paceline.trainer.base import TrainerBase
from paceline.trainer.callbacks import Callback
from paceline.trainer.history import History, where_stopped
from paceline.trainer.reporting import Reporter
from paceline.trainer.stop_requests import LEAVE, STOP, StopRequests
from paceline.world import World

_IGNORED = "BackupAndRestore"
_DEFAULT_BATCH = 32
"""To evaluate or predict with, on each replica: it changes no result."""


class TensorFlowTrainer:
    """Trains a Keras model under a ``tf.distribute`` strategy, with a run as ``paceline.Trainer``.

        def build():
            model = tf.keras.Sequential([tf.keras.layers.Dense(10)])
            model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            return model

        trainer = TensorFlowTrainer(build, global_batch=64, run_dir="runs/digits")
        history = trainer.fit((x, y), (x_val, y_val), epochs=3, nproc=2)

    Keras runs the steps: its callbacks, metrics, schedules and ``train_step`` work as they do
    there. Events, checkpoints, resume and trackers are Paceline's.

    Args:
        model: A Keras model, or a function that builds it, which is called under the strategy's
            scope. Several workers need a function.
        strategy: ``"mirrored"`` (the devices of one process), ``"multi_worker"`` (ranks of a
            launcher), ``"auto"`` (what fits what was started), or a ``tf.distribute.Strategy``.
        optimizer: Keras' optimizer, its name, or a function that makes it. Leave it out, with loss
            and metrics, where the model is compiled already.
        loss: Keras' loss, its name, or a function.
        metrics: A list of Keras' metrics or their names, or a function that makes it.
        global_batch: Samples per step, over all workers. Not needed where the data is a
            ``tf.data.Dataset``, whose batch it then is.
        per_device_batch: Instead of global_batch: samples per step of one replica.
        run_dir: The run's folder for events and checkpoints. None keeps nothing on disk.
        seed: The seed of the order of samples, and of TensorFlow's random numbers.
        callbacks: Keras' callbacks, and those of Paceline such as ``paceline.EarlyStopping``.
        trackers: Readers of the run's events, such as those in ``paceline.track``.
        progress: Show a progress bar, or lines where the output is not a terminal.
        data: How batches are drawn: ``shuffle`` and ``drop_last``.
        checkpoint: What is saved and kept.
        timeout: Seconds a rank waits for the others before giving up. None: 300.
    """

    def __init__(
        self,
        model: Any,
        *,
        strategy: Any = "auto",
        optimizer: Any = None,
        loss: Any = None,
        metrics: Sequence[Any] | Callable[[], Sequence[Any]] | None = None,
        global_batch: int | None = None,
        per_device_batch: int | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        seed: int = 0,
        callbacks: Sequence[Any] = (),
        trackers: Sequence[Tracker] = (),
        progress: bool = True,
        data: DataOptions = DataOptions(),
        checkpoint: Checkpointing = Checkpointing(),
        timeout: float | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown(TensorFlowTrainer, unknown, beside=TensorFlowTrainer.fit)
        check_strategy(strategy)
        check_model(model)
        check_run_dir(run_dir)
        self.own_callbacks, self.keras_callbacks, self._left_out = _by_kind(callbacks)
        check_looking_on(self.own_callbacks, {}, trackers)
        self.batch = BatchSizes(global_batch, per_device_batch)
        if global_batch is not None and per_device_batch is not None:
            raise DataError(
                f"global_batch={global_batch} and per_device_batch={per_device_batch} both say how "
                "many samples a step takes. Give one of them."
            )
        require_tensorflow()
        self.model, self.strategy = model, strategy
        self.optimizer, self.loss, self.metrics = optimizer, loss, metrics
        self.shown_dir = None if run_dir is None else Path(run_dir)
        self.run_dir = None if run_dir is None else Path(run_dir).absolute()
        self.events_dir = self.run_dir
        self.seed, self.trackers, self.progress = seed, list(trackers), progress
        self.data, self.checkpoint, self.timeout = data, checkpoint, timeout
        self.events_are_shown = False
        self.length: tuple[int | None, int | None] = (None, None)
        self.epoch = 0
        self.step = 0
        """How many optimizer steps the run has done."""
        self.built_model: Any = None
        """The Keras model under the strategy, once it was needed."""
        self.built_strategy: Any = None
        self.brought_weights: list[Any] | None = None
        """What ranks of ``fit(nproc=…)`` had learned, until the model is built here."""
        self._stops: StopRequests | None = None

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks of Paceline among those given."""
        return self.own_callbacks

    @property
    def checkpoint_dir(self) -> str | None:
        """Where checkpoints go, a path or a URL; ``None`` when the run keeps nothing on disk."""
        return TrainerBase.checkpoint_dir.fget(cast(TrainerBase, self))  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ fit

    def fit(
        self,
        train: Any,
        val: Any = None,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        nproc: int | None = None,
        resume: Resume | Literal["auto"] | None = False,
        max_restarts: int | None = None,
        **unknown: Never,
    ) -> History:
        """Train on ``train`` for ``epochs`` or ``steps``, evaluating on ``val`` after each epoch.

        Both may be NumPy arrays such as ``(x, y)``, a dataset with ``len()`` and ``[index]`` that
        gives single samples, a ``tf.data.Dataset`` of batches, or a function that returns one of
        them. Started by a launcher, the process is one of its workers; started by hand it trains
        alone, or with ``nproc`` brings up that many workers and takes over what they learned;
        those that die are started again up to ``max_restarts`` times in a row (``None``: 3 times
        where there is a ``run_dir``, else never).

        ``resume=True`` or ``"auto"`` goes on from the newest checkpoint in ``run_dir`` (from the
        beginning where there is none), on any number of workers. ``"best"``, or the number of a
        step, goes back to that one.

        Ctrl-C or SIGTERM on any rank ends the run after the current step on all of them, saves
        where there is a ``run_dir``, and raises ``KeyboardInterrupt`` or ``SystemExit``.
        """
        refuse_unknown(TensorFlowTrainer.fit, unknown, beside=TensorFlowTrainer)
        check_length(epochs, steps)
        going_on: Resume = True if resume == "auto" else (resume or False)
        like = cast(TrainerBase, self)
        check_folder(like, going_on)
        # Which metrics there are, Keras knows when the model is compiled.
        watched_metrics(self.checkpoint, self.callbacks, self.run_dir, val)
        check_restarts(max_restarts)
        if nproc is not None and read_environment() is None:
            check_nproc(nproc)
            if nproc > 1:
                return fit_on_new_ranks(
                    self,
                    TensorFlowTrainer._fit_here,
                    (train, val, epochs, steps, going_on),
                    nproc=nproc,
                    max_restarts=max_restarts,
                )
        env = read_environment()
        if nproc is not None and env is not None and nproc != env.size:
            raise TrainingError(
                f"fit(nproc={nproc}) was called in a world of {env.size} ranks that a launcher "
                f"started. Leave nproc out, or start {nproc} ranks."
            )
        return self._fit_here(train, val, epochs, steps, going_on)

    def _fit_here(
        self, train: Any, val: Any, epochs: int | None, steps: int | None, resume: Resume
    ) -> History:
        """``fit`` on this rank."""
        self.length = (epochs, steps)
        world, _ = self._ready()
        state = self._state(world)
        goes_on = self.checkpoint_dir is not None and (
            resume is not False or world.restart_count > 0
        )
        train_data = self._data(train, "train")
        val_data = None
        if val is not None:
            size = train_data.global_batch
            val_data = self._data(val, "val", shuffle=False, default_batch=size)
        self._make_variables(train_data)
        reporter = self._reporter(world, goes_on)
        try:
            checkpoints = self._checkpoints(state, reporter)
        except BaseException:
            reporter.close()
            raise
        clean = False
        with StopRequests(world) as stops:
            self._stops = stops
            loop = KerasLoop(
                self,
                state,
                train_data,
                val_data,
                total_steps=_total_steps(train_data, epochs, steps),
                epochs=epochs,
                reporter=reporter,
                stops=stops,
                checkpoints=checkpoints,
            )
            try:
                if goes_on and checkpoints is not None:
                    self._resume(loop, checkpoints, resume)
                for name in self._left_out:
                    reporter.emit(
                        Note(
                            message=f"the callback {name} is left out: the run's own checkpoints "
                            "go on at the very step. resume='auto' does what it does",
                            level="warning",
                        )
                    )
                state.global_batch = train_data.global_batch
                history = loop.run()
                clean = True
            finally:
                self.step, self._stops = state.steps_done, None
                if checkpoints is not None:
                    loop.saves.tell(wait=True)
                    checkpoints.close(clean=clean)
                reporter.close()
        if history.reason == "interrupted":
            stops.leave(where_stopped(history, self.run_dir))
        return history

    def _ready(self) -> tuple[World, Environment | None]:
        """The world joined, and the model built under its strategy; once."""
        env = read_environment()
        if env is not None and env.size > 1:
            prefer_legacy_keras()
        world = World.init(backend="gloo", device="cpu", timeout=self.timeout)
        if self.built_model is None:
            strategy = make_strategy(self.strategy, env)
            import_tensorflow().random.set_seed(self.seed)
            model = build_model(self.model, strategy, env)
            if self.optimizer is not None or self.loss is not None or self.metrics is not None:
                compile_model(model, strategy, self.optimizer, self.loss, self.metrics)
            self.built_model, self.built_strategy = model, strategy
        return world, env

    def _state(self, world: World) -> KerasState:
        layout = Layout.parse(f"dp={self.built_strategy.num_replicas_in_sync}")
        return KerasState(self.built_model, self.built_strategy, world, layout)

    def _make_variables(self, train: Data, *, optimizer: bool = True) -> None:
        """Build what is not yet: a checkpoint is restored into variables that are there."""
        model, strategy = self.built_model, self.built_strategy
        if optimizer:
            compile_model(model, strategy, None, None, None)
        if not model.built:
            batch = train.first_batch()
            with strategy.scope():
                model(batch[0] if isinstance(batch, tuple) else batch)
        if optimizer:
            build_optimizer(model, strategy)
        if self.brought_weights is not None:
            with strategy.scope():
                model.set_weights(self.brought_weights)
            self.brought_weights = None

    def _data(
        self,
        given: Any,
        name: str,
        *,
        shuffle: bool | None = None,
        default_batch: int | None = None,
    ) -> Data:
        replicas = self.built_strategy.num_replicas_in_sync
        if shuffle is None:
            shuffle = True if self.data.shuffle is None else self.data.shuffle
        found = make_data(
            given,
            name,
            global_batch=self.batch.on(replicas, exact=False).global_batch,
            seed=self.seed,
            shuffle=shuffle,
            drop_last=self.data.drop_last and name == "train",
            default_batch=default_batch,
        )
        if found.global_batch % replicas:
            raise DataError(
                f"global_batch={found.global_batch} does not divide among {replicas} replicas, as "
                "Keras' mean over replicas needs. Take a multiple, such as "
                f"{max(1, found.global_batch // replicas) * replicas}, or other workers."
            )
        return found

    def _checkpoints(self, state: KerasState, reporter: Reporter) -> Checkpoints | None:
        if self.checkpoint_dir is None:
            return None
        return Checkpoints(
            self.checkpoint_dir, state, options=self.checkpoint, report=reporter.emit
        )

    def _resume(self, loop: KerasLoop, checkpoints: Checkpoints, resume: Resume) -> None:
        restored = checkpoints.restore(None if isinstance(resume, bool) else resume)
        if restored is None:
            where = f"{checkpoints.folder.where} holds no checkpoint"
            loop.reporter.emit(Note(message=f"{where}: the run starts from the beginning"))
            return
        before, now = loop.state.global_batch, loop.train.global_batch
        if before is not None and before != now:
            raise DataError(
                f"the run was begun with global_batch={before}, and is resumed with {now}: its "
                f"position in the data would be another. Resume it with global_batch={before}."
            )
        loop.saves.went_on_from(loop.state.steps_done, restored.path)
        self.epoch = loop.state.steps_done // loop.per_epoch

    def _reporter(self, world: World, resumed: bool) -> Reporter:
        history = History()
        if resumed and self.run_dir is not None and (self.run_dir / FILE_NAME).exists():
            history = History.read(self.run_dir)
            history.reason = ""
        trackers = list(self.trackers)
        if self.progress and world.is_main:
            from paceline.track import Progress

            trackers.append(Progress())
        warns = not (trackers or self.events_are_shown)
        try:
            return Reporter(self.events_dir, trackers, history, main=world.is_main, warns=warns)
        except OSError as error:
            raise TrainingError(
                f"cannot write events to {self.events_dir}: {error}. Choose another run_dir."
            ) from error

    # ------------------------------------------------------------------ other verbs

    def evaluate(self, data: Any, *, which: Which | None = None) -> dict[str, float]:
        """The loss and the metrics of the model over ``data``, the same on every rank.

        ``data`` is as for ``fit``, and every sample counts once. ``which`` loads these weights of
        ``run_dir`` first: ``"best"``, ``"last"`` or a step.
        """
        found = self._passing(data, "evaluate", which)
        batches, steps = found.evaluation(self.built_strategy)
        values = self.built_model.evaluate(batches, steps=steps, verbose=0, return_dict=True)
        return {name: float(value) for name, value in values.items()}

    def predict(self, data: Any, *, which: Which | None = None) -> Any:
        """The model's outputs for ``data`` as NumPy arrays, in the order of the data.

        ``data`` is as for ``fit``, or inputs alone. Every rank computes all rows.
        """
        self._ready()
        found = make_data(
            data,
            "predict",
            global_batch=self.batch.global_batch,
            seed=self.seed,
            shuffle=False,
            drop_last=False,
            default_batch=self.batch.per_device_batch or _DEFAULT_BATCH,
        )
        self._make_variables(found, optimizer=False)
        if which is not None:
            self.load_weights(which)
        model = self.built_model
        tf = import_tensorflow()
        if isinstance(found, IndexedData):
            import numpy as np

            assert found.samples is not None
            size = found.global_batch
            parts = [
                found.source.batch(np.arange(at, min(at + size, found.samples)), None)[0]
                for at in range(0, found.samples, size)
            ]
        else:
            parts = [one[0] if isinstance(one, tuple) else one for one in found.dataset]
        rows = [tf.nest.map_structure(lambda t: t.numpy(), model(x, training=False)) for x in parts]
        return tf.nest.map_structure(lambda *arrays: _joined(arrays), *rows)

    def load_weights(self, which: Which = "best") -> str:
        """Give the model the weights of a checkpoint of ``run_dir``, and return its path.

        Every rank must call it. A model that Keras has not built yet (no input shape, no call so
        far) is built by ``fit``, ``evaluate`` or ``predict``.
        """
        if self.checkpoint_dir is None:
            raise TrainingError(
                f"load_weights({which!r}): the trainer has no run_dir, so nothing was saved. Pass "
                "run_dir= to the TensorFlowTrainer."
            )
        world, _ = self._ready()
        where, key = self.checkpoint_dir, self.checkpoint.digest_key
        checkpoint = on_all_ranks(lambda: find_checkpoint(where, which, follow=True, key=key))
        opened = on_all_ranks(lambda: OpenedCheckpoint(checkpoint, lambda name: name == "keras"))
        load = functools.partial(fill, world, checkpoint)
        self.step = self._state(world).take_weights(opened, load)
        return str(checkpoint.path)

    def stop(self, reason: str = "") -> None:
        """Ask, from a callback on any rank, that the run ends after the current step."""
        if self._stops is not None:
            self._stops.ask(STOP, reason)

    def interrupt(self) -> None:
        """Ask, from any thread of any rank, that the run saves and leaves, as SIGTERM does."""
        if self._stops is not None:
            self._stops.ask(LEAVE)

    def for_ranks(self, *, events_are_shown: bool) -> TensorFlowTrainer:
        """A copy to send to ranks: they write events, and whoever started them shows those."""
        copied = copy.copy(self)
        copied.trackers, copied.progress = [], False
        copied.events_are_shown = events_are_shown
        copied.built_model = copied.built_strategy = None
        return copied

    def _passing(self, data: Any, name: str, which: Which | None) -> Data:
        self._ready()
        compile_model(self.built_model, self.built_strategy, None, None, None)
        size = _DEFAULT_BATCH * self.built_strategy.num_replicas_in_sync
        found = self._data(data, name, shuffle=False, default_batch=size)
        self._make_variables(found, optimizer=False)
        if which is not None:
            self.load_weights(which)
        return found


def _joined(arrays: Sequence[Any]) -> Any:
    import numpy as np

    return np.concatenate(arrays)


def _by_kind(callbacks: Any) -> tuple[list[Callback], list[Any], list[str]]:
    """Paceline's callbacks, Keras', and the names of those that a run of ours has no use for."""
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise TrainingError(f"callbacks={callbacks!r} must be a list of callbacks.")
    own = [one for one in callbacks if isinstance(one, Callback)]
    others = [one for one in callbacks if not isinstance(one, Callback)]
    for one in others:
        if isinstance(one, type) or not hasattr(one, "set_model"):
            raise TrainingError(
                f"callbacks: {one!r} is neither a callback of Keras nor a paceline.Callback."
            )
    left_out = [type(one).__name__ for one in others if type(one).__name__ == _IGNORED]
    return own, [one for one in others if type(one).__name__ != _IGNORED], left_out


def _total_steps(train: Data, epochs: int | None, steps: int | None) -> int:
    if steps is not None:
        return steps
    assert epochs is not None
    if train.steps is None:
        raise DataError(
            f"fit(epochs={epochs}): the tf.data.Dataset has no end, so that it has no epochs. Give "
            "steps instead."
        )
    return epochs * train.steps
