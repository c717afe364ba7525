"""What a trainer does with a model beside training it: evaluate and predict, on any layout."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Never, TypeVar

from torch import nn

from paceline.checkpoint.best import Mode
from paceline.checkpoint.locate import Which
from paceline.checkpoint.manifest import step_of
from paceline.data import Loader
from paceline.engine import Engine
from paceline.engine.internals import internals_of
from paceline.engine.predicted_rows import Rows, Take
from paceline.errors import TrainingError
from paceline.events import EvalDone
from paceline.launch import local
from paceline.launch.environment import read_environment
from paceline.launch.job import check_nproc
from paceline.options.arguments import refuse_unknown
from paceline.options.ema import Weights, check_weights
from paceline.track import Progress, Tracker, following
from paceline.trainer.base import TrainerBase
from paceline.trainer.evaluate import evaluate
from paceline.trainer.fit_data import engine_options, expect_all_ranks, make_loader
from paceline.trainer.history import History
from paceline.trainer.pass_progress import PassProgress
from paceline.trainer.predict import PredictionPass, check_order
from paceline.trainer.prediction_files import check_out
from paceline.trainer.reporting import Reporter
from paceline.trainer.stop_requests import LEAVE, Interrupted, StopRequests
from paceline.trainer.weights import load_weights
from paceline.world import World, rng_state, set_rng_state

T = TypeVar("T")


class _Pass(NamedTuple):
    """One pass over data: with what, over what, and who hears of it."""

    engine: Engine
    loader: Loader
    stops: StopRequests
    reporter: Reporter
    step: int
    """The step whose weights the model has."""


class InferenceTrainer(TrainerBase):
    """The part of ``paceline.Trainer`` that trains nothing."""

    def evaluate(
        self,
        data: Any,
        *,
        which: Which | None = None,
        weights: Weights | None = None,
        batches: int | None = None,
        nproc: int | None = None,
        **unknown: Never,
    ) -> dict[str, float]:
        """The loss and the metrics of the model over ``data``, the same on every rank.

            trainer.evaluate(test_dataset, which="best")

        Every sample counts once, whatever the layout and however the data is cut. The model is as
        it is after ``fit``, or as it was given; the model's training mode and random streams are
        left as they were. No optimizer is needed.

        Args:
            data: a dataset, a torch ``DataLoader`` or a ``paceline.data.Loader``, with targets.
            which: first load these weights of ``run_dir``: ``"best"``, ``"last"`` or a step.
            weights: ``"model"``, or ``"ema"`` for the averaged weights (``ema=``) alone. By default
                those of the model, and where an average is kept also its metrics, as ``ema/loss``
                and so on. With ``which`` those of the checkpoint.
            batches: only so many global batches.
            nproc: started by hand, bring up that many ranks for it, as ``fit`` does.
        """
        refuse_unknown(InferenceTrainer.evaluate, unknown, beside=type(self))
        if batches is not None and (not isinstance(batches, int) or batches < 1):
            raise TrainingError(f"evaluate: batches={batches!r} must be a whole number, 1 or more.")
        check_weights(weights, "evaluate")
        if _needs_new_ranks(nproc):
            return _on_new_ranks(
                self,
                nproc,
                lambda own: own.evaluate(data, which=which, weights=weights, batches=batches),
            )
        with self._passing(data, "evaluate", which, weights, nproc) as given:
            engine, loader, stops, reporter, step = given
            progress = PassProgress(reporter.emit, "evaluation", step, loader, batches)

            def between() -> None:
                if stops.agree() >= LEAVE:
                    raise Interrupted

            metrics, samples, seconds = evaluate(
                engine,
                loader,
                self.metrics,
                progress=progress,
                # With which= the model itself has been given the weights asked for.
                weights="model" if weights == "ema" and which is not None else weights,
                batches=batches,
                between=between,
            )
            done = EvalDone(
                step=step,
                epoch=self.epoch,
                metrics=metrics,
                samples=samples,
                seconds=seconds,
                data="",
            )
            reporter.emit(done)
        return metrics

    def predict(
        self,
        data: Any,
        *,
        out: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        which: Which | None = None,
        weights: Weights = "model",
        take: Take = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        nproc: int | None = None,
        **unknown: Never,
    ) -> Any:
        """The model's outputs for ``data``: a row for each sample, in the order of the data.

            logits = trainer.predict(dataset)
            trainer.predict(dataset, out="predictions.npz", which="best")

        Every sample is there once, on any layout and any number of ranks. Without ``out`` every
        rank gets all rows on the CPU: a tensor, or a dict of tensors by name where the model
        returns several. With ``out`` rank 0 writes them as they come, so that memory holds one
        batch, and the path of the file is returned; the file is there when it is whole. Neither
        targets nor an optimizer are needed.

        Args:
            data: a dataset, a torch ``DataLoader`` or a ``paceline.data.Loader`` that does not
                shuffle. Its samples are ``x``, ``(x,)``, ``(x, target)`` or mappings.
            out: a file whose name ends in .npy (one tensor), .npz, .safetensors or .jsonl (rows of
                any shape).
            overwrite: replace a file that is there already.
            which: first load these weights of ``run_dir``: ``"best"``, ``"last"`` or a step.
            weights: ``"ema"`` for the averaged weights (``ema=``); with ``which`` those of the
                checkpoint.
            take: what to keep of the model's output: the name of a part of it, such as
                ``"logits"``, or a function of the output of a batch.
            forward: called as ``forward(model, batch)``, it returns the output, where the model is
                not simply called with its batch.
            nproc: started by hand, bring up that many ranks for it, as ``fit`` does.
        """
        refuse_unknown(InferenceTrainer.predict, unknown, beside=type(self))
        if take is not None and not isinstance(take, str) and not callable(take):
            raise TrainingError(f"predict: take={take!r} must be a name or a function.")
        check_weights(weights, "predict")
        path = None if out is None else Path(out).absolute()
        if out is not None and ((env := read_environment()) is None or env.rank == 0):
            path = check_out(out, overwrite=overwrite)
        if _needs_new_ranks(nproc):
            return _on_new_ranks(
                self,
                nproc,
                lambda own: own.predict(
                    data,
                    out=path,
                    overwrite=overwrite,
                    which=which,
                    weights=weights,
                    take=take,
                    forward=forward,
                ),
            )
        with self._passing(data, "predict", which, weights, nproc) as given:
            engine, loader, stops, reporter, step = given
            check_order(loader)
            progress = PassProgress(reporter.emit, "prediction", step, loader)
            predicting = PredictionPass(engine, stops, take=take, forward=forward, out=path)
            if which is None:  # else the model itself has been given them
                predicting.weights = weights
            rows: Rows | None = predicting.run(loader, progress)
        return path if out is not None else rows

    def load_weights(
        self,
        which: Which = "best",
        *,
        weights: Weights = "model",
        metric: str | None = None,
        mode: Mode | None = None,
    ) -> str:
        """Give the model the weights of a checkpoint of ``run_dir``, and return its path.

            trainer.load_weights()  # the best, by the metric of Checkpointing(best=)

        The arguments are those of ``paceline.load_weights``. Nothing but the model changes. Every
        rank must call it.
        """
        if self.checkpoint_dir is None:
            raise TrainingError(
                f"load_weights({which!r}): the trainer has no run_dir, so nothing was saved. Pass "
                "run_dir= to the Trainer, or call paceline.load_weights(model, run)."
            )
        has_engine = self._engine is not None or self._brought is not None
        target = self.engine if has_engine else self.model
        # The folder of a run from a config also says how its storage is opened.
        by_config = self.run_dir is not None and (self.run_dir / "config.yaml").is_file()
        where = self.run_dir if self.run_dir is not None and by_config else self.checkpoint_dir
        key = self.checkpoint.digest_key
        return load_weights(
            target,
            where,
            which,
            weights=weights,
            metric=metric,
            mode=mode,
            follow=True,
            key=key,
        )

    # ------------------------------------------------------------------ how a pass goes

    @contextlib.contextmanager
    def _passing(
        self,
        data: Any,
        verb: str,
        which: Which | None,
        weights: Weights | None,
        nproc: int | None,
    ) -> Iterator[_Pass]:
        """What a pass over ``data`` needs, put away afterwards."""
        engine = self._engine_for(data, verb)
        world = engine.world
        if nproc is not None and nproc != world.size:
            raise TrainingError(
                f"{verb}(nproc={nproc}) was called in a world of {world.size} ranks that was "
                f"started already. Leave nproc out, or start {nproc} ranks."
            )
        step = engine.steps_done
        if which is not None:
            path = self.load_weights(which, weights=weights or "model")
            step = step_of(path.rstrip("/").rpartition("/")[2]) or step
        loader = make_loader(self, data, verb)
        loader.take_note()
        expect_all_ranks(loader, alone=False)
        trackers: list[Tracker] = []
        in_fit = self._stops is not None  # called by a callback: the bar is that of the training
        if self.progress and world.is_main and not in_fit:
            trackers.append(Progress())
        reporter = Reporter(
            self.pass_events_dir, trackers, History(), main=world.is_main, warns=False
        )
        stops = StopRequests(world) if self._stops is None else self._stops
        try:
            with contextlib.nullcontext() if in_fit else stops:
                yield _Pass(engine, loader, stops, reporter, step)
        except Interrupted:
            if in_fit:
                raise
            stops.leave(f"stopped while {verb} was under way; nothing of it is kept")
        finally:
            reporter.close()
            if loader is not data:
                loader.close()

    def _engine_for(self, data: Any, verb: str) -> Engine:
        """The trainer's engine; made here, without a step, where there is none yet."""
        if self._engine is None and self._brought is None:
            world = World.init(timeout=self.timeout)
            random = rng_state()
            world.seed(self.seed)
            try:
                options = engine_options(self, data, world, goes_on=True, verb=verb)
                self._engine = Engine(
                    self.model,
                    optimizer=self.optimizer,
                    loss=self.loss,
                    world=world,
                    **options.arguments(),
                )
            finally:
                set_rng_state(random)
            self.model = self._engine.model
            if self.optimizer is not None:
                self.optimizer = self._engine.optimizer
            if self.averages is not None:
                internals_of(self._engine).context.kept_average().take_whole(self.averages)
        return self.engine


def _needs_new_ranks(nproc: int | None) -> bool:
    if nproc is None:
        return False
    check_nproc(nproc)
    return nproc > 1 and read_environment() is None


def _on_new_ranks(
    trainer: InferenceTrainer, nproc: int | None, act: Callable[[InferenceTrainer], T]
) -> T:
    """What ``act`` returns on rank 0 of new ranks, which have the trainer's model as it is now."""
    assert nproc is not None
    trackers: list[Tracker] = [Progress()] if trainer.progress else []
    rank_trainer = trainer.for_ranks(events_are_shown=bool(trackers))
    rank_trainer.optimizer = None
    if trainer.engine_options.ema is not None and trainer.step:
        rank_trainer.averages = internals_of(trainer.engine).state.averages()
    with tempfile.TemporaryDirectory(prefix="paceline-events-") as folder:
        rank_trainer.pass_events_dir = Path(folder)

        def on_each_rank() -> T:
            return act(rank_trainer)

        with following(folder, trackers):
            result: T = local.call(on_each_rank, nproc=nproc, events_dir=Path(folder))
    return result
