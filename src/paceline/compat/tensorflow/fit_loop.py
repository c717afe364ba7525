"""One call of ``TensorFlowTrainer.fit`` on one rank: Keras' ``fit`` with our events and saves.

Keras runs the steps, the user's callbacks and the validation. Two callbacks of ours are around the
user's: the first reports, the last saves and hears what the ranks were asked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from paceline.checkpoint.checkpoints import Checkpoints
from paceline.compat.tensorflow.keras_data import Data, IndexedData
from paceline.compat.tensorflow.keras_state import KerasState
from paceline.compat.tensorflow.library import import_tensorflow, keras_of
from paceline.errors import NonFiniteError
from paceline.events import EpochDone, EvalDone, NonFinite, Note, RunFinished, RunStarted, StepDone
from paceline.options import Checkpointing
from paceline.trainer.callbacks import Callback, CallbackStates, sign_of, value_of
from paceline.trainer.history import History
from paceline.trainer.reporting import Reporter
from paceline.trainer.save_schedule import Saves
from paceline.trainer.saved_fields import Fits, is_count, is_metrics, is_number, known_fields
from paceline.trainer.stop_requests import GO_ON, LEAVE, STOP, StopRequests

_SAVED: dict[str, Fits] = {
    "epoch_loss": is_number,
    "epoch_samples": is_count,
    "epoch_seconds": is_number,
    "last_metrics": is_metrics,
    "best": lambda value: isinstance(value, list) and all(map(is_number, value)),
}
"""What a checkpoint keeps of the loop, by attribute, and what each may be."""

_PRECISIONS = {"float32": "fp32", "mixed_float16": "fp16", "mixed_bfloat16": "bf16"}


class StepNumbers(NamedTuple):
    """What a ``paceline.Callback`` is told of a step."""

    step: int
    loss: float
    lr: float
    samples: int
    seconds: float


class Segment(NamedTuple):
    """What one call of Keras' ``fit`` does: ``epochs`` from ``epoch`` on, of ``steps`` each."""

    first: int
    epoch: int
    epochs: int
    steps: int


def segments(first: int, total: int, per_epoch: int) -> Iterator[Segment]:
    """The steps ``first`` to ``total`` as parts of an epoch and whole ones.

    Keras knows whole epochs alone: one that a resume begins in the middle, or that the run ends
    in, is a call of its own.
    """
    while first < total:
        epoch, at = divmod(first, per_epoch)
        whole = (total - first) // per_epoch
        if at or not whole:
            found = Segment(first, epoch, 1, min(per_epoch - at, total - first))
        else:
            found = Segment(first, epoch, whole, per_epoch)
        yield found
        first += found.epochs * found.steps


class _Left(Exception):
    """All ranks have agreed to leave."""


@dataclass
class _SavedRun:
    """What ``Saves`` looks at of a trainer."""

    engine: KerasState
    checkpoint: Checkpointing
    run_dir: Path | None
    shown_dir: Path | None
    grace: float | None = None


class FittingTrainer(Protocol):
    """What the loop needs of the trainer that it runs for; callbacks are given the trainer."""

    built_model: Any
    built_strategy: Any
    own_callbacks: list[Callback]
    keras_callbacks: list[Any]
    checkpoint: Checkpointing
    run_dir: Path | None
    shown_dir: Path | None
    epoch: int


class KerasLoop:
    """Drives Keras' ``fit`` until there is nothing left to do, or a stop."""

    def __init__(
        self,
        trainer: FittingTrainer,
        state: KerasState,
        train: Data,
        val: Data | None,
        *,
        total_steps: int,
        epochs: int | None,
        reporter: Reporter,
        stops: StopRequests,
        checkpoints: Checkpoints | None,
    ) -> None:
        self.trainer, self.state = trainer, state
        self.model, self.strategy = trainer.built_model, trainer.built_strategy
        self.train, self.val = train, val
        self.total_steps, self.epochs = total_steps, epochs
        self.per_epoch = train.steps or total_steps
        self.reporter, self.stops = reporter, stops
        self.pulse = state.world.pulse
        if checkpoints is not None:
            checkpoints.add("loop", self)
            checkpoints.add("callbacks", CallbackStates(trainer.own_callbacks, reporter))
        saved: Any = _SavedRun(state, trainer.checkpoint, trainer.run_dir, trainer.shown_dir)
        self.saves = Saves(
            saved,
            checkpoints,
            reporter,
            stops,
            catch_up=lambda: None,
            each=lambda method, _, *rest: self._each(method, *rest),
        )
        self.has_checkpoints = checkpoints is not None
        self.started = time.perf_counter()
        self.epoch_loss, self.epoch_samples, self.epoch_seconds = 0.0, 0, 0.0
        self.last_metrics: dict[str, float] = {}
        self.evaluated_at = -1
        self.best: list[float] = []
        self.samples = 0
        self.request = GO_ON
        self._seen = 0
        self._last = self.started
        self._eval_began = self.started
        self._eval_seconds = 0.0

    # ------------------------------------------------------------------ the run

    def run(self) -> History:
        """Train to the end, or to where the ranks agreed to stop."""
        self._announce()
        self._each("on_fit_start")
        self.request = self.stops.agree()
        try:
            for segment in segments(self.state.steps_done, self.total_steps, self.per_epoch):
                if self.request != GO_ON:
                    break
                self._fit(segment)
        except _Left:
            self.request = self.stops.agreed
        last = None
        if self.request >= LEAVE or self.trainer.checkpoint.save_at_end:
            last = "stop" if self.request else "end"
        if self.request >= LEAVE:
            self.saves.save_and_leave(**self._beside_state())
        self.saves.finish(last, leaving=self.request >= LEAVE, **self._beside_state())
        history = self._finish()
        self._each("on_fit_end", history)
        return history

    def _fit(self, segment: Segment) -> None:
        stop = segment.first + segment.epochs * segment.steps
        validation: dict[str, Any] = {}
        if self.val is not None:
            data, steps = self.val.evaluation(self.strategy)
            validation = {"validation_data": data, "validation_steps": steps}
        self._last = time.perf_counter()
        self.model.stop_training = False
        self.model.fit(
            self.train.training(self.strategy, segment.first, stop),
            epochs=segment.epoch + segment.epochs,
            initial_epoch=segment.epoch,
            steps_per_epoch=segment.steps,
            callbacks=[self._reporting(), *self.trainer.keras_callbacks, self._saving()],
            shuffle=False,
            verbose=0,
            **validation,
        )
        if self.model.stop_training and self.request == GO_ON:
            self.stops.ask(STOP, "a Keras callback has set stop_training")
            self.request = self.stops.agree()

    def _reporting(self) -> Any:
        callback = keras_of(self.model).callbacks.LambdaCallback()
        callback.on_epoch_begin = self._epoch_begins
        callback.on_train_batch_begin = self._batch_begins
        callback.on_train_batch_end = self._batch_ends
        callback.on_test_begin = self._test_begins
        callback.on_test_end = self._test_ends
        callback.on_test_batch_end = lambda batch, logs=None: self.pulse.beat()
        callback.on_epoch_end = self._epoch_ends
        return callback

    def _saving(self) -> Any:
        callback = keras_of(self.model).callbacks.LambdaCallback()
        callback.on_train_batch_end = self._save_after_batch
        callback.on_epoch_end = self._save_after_epoch
        return callback

    # ------------------------------------------------------------------ what Keras calls

    def _epoch_begins(self, epoch: int, logs: Any = None) -> None:
        self._seen = 0
        self.trainer.epoch = epoch

    def _batch_begins(self, batch: int, logs: Any = None) -> None:
        if self._seen:  # Keras gives the mean since the epoch began, and has just begun the first
            for metric in self.model.metrics:
                if metric.name == "loss":
                    metric.reset_state()

    def _batch_ends(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {} if logs is None else logs
        done, self._seen = batch + 1 - self._seen, batch + 1
        first = self.state.steps_done
        step = self.state.steps_done = first + done
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        loss = float(logs.get("loss", math.nan))
        samples = sum(self.train.samples_of(one) for one in range(first, step))
        self.samples += samples
        self.epoch_seconds += seconds
        self.epoch_samples += samples
        self.epoch_loss += loss * samples
        numbers = StepNumbers(step, loss, learning_rate(self.model.optimizer), samples, seconds)
        self.reporter.emit(StepDone(epoch=self.trainer.epoch, **numbers._asdict()))
        self.pulse.finish_step(step)
        if not math.isfinite(loss):
            self._stop_at(step, loss)
        if "loss" in logs:
            logs["loss"] = self.epoch_loss / self.epoch_samples
        self._each("on_step_end", numbers)

    def _stop_at(self, step: int, loss: float) -> None:
        ranks = list(range(self.state.world.size))
        told = f"the loss of step {step} is {loss}"
        event = NonFinite(step=step, what="loss", ranks=ranks, action="stop", detail=told)
        self.reporter.emit(event)
        raise NonFiniteError(
            f"{told}: the model has been changed by it. Lower the learning rate, clip gradients "
            "(the optimizer's clipnorm), and go on from an earlier checkpoint (resume=STEP).",
            step=step,
            what="loss",
            ranks=ranks,
        )

    def _save_after_batch(self, batch: int, logs: Any = None) -> None:
        step = self.state.steps_done
        if self.saves.checkpoints is not None and not self.saves.checkpoints.has_begun:
            self.saves.begin()
        if step % self.per_epoch:  # else with the epoch's metrics
            self._obey(self.saves.if_due(step, epoch_over=False, **self._beside_state()))
        self._last = time.perf_counter()

    def _test_begins(self, logs: Any = None) -> None:
        self._eval_began = time.perf_counter()
        self.pulse.pause()

    def _test_ends(self, logs: Any = None) -> None:
        self._eval_seconds = time.perf_counter() - self._eval_began

    def _epoch_ends(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {} if logs is None else logs
        step, samples = self.state.steps_done, self.epoch_samples
        loss = self.epoch_loss / samples if samples else math.nan
        if "loss" in logs:
            logs["loss"] = loss
        if step % self.per_epoch == 0:
            logged = {
                name: float(value)
                for name, value in logs.items()
                if name != "loss" and not name.startswith("val_")
            }
            self.reporter.emit(
                EpochDone(
                    step=step,
                    epoch=epoch,
                    loss=loss,
                    samples=samples,
                    seconds=self.epoch_seconds,
                    logged=logged,
                )
            )
            self.epoch_loss, self.epoch_samples, self.epoch_seconds = 0.0, 0, 0.0
            self._each("on_epoch_end", epoch)
        found = {n.removeprefix("val_"): float(v) for n, v in logs.items() if n.startswith("val_")}
        if found:
            self._evaluated(step, epoch, found)

    def _evaluated(self, step: int, epoch: int, metrics: dict[str, float]) -> None:
        self.last_metrics, self.evaluated_at = metrics, step
        assert self.val is not None
        samples = self.val.samples or 0
        self.reporter.emit(
            EvalDone(
                step=step,
                epoch=epoch,
                metrics=metrics,
                samples=samples,
                seconds=self._eval_seconds,
            )
        )
        self._each("on_evaluate", metrics)

    def _save_after_epoch(self, epoch: int, logs: Any = None) -> None:
        step = self.state.steps_done
        self._keep_best(step)
        over = step % self.per_epoch == 0
        self._obey(self.saves.if_due(step, epoch_over=over, **self._beside_state()))
        self.pulse.pause()
        self._last = time.perf_counter()

    def _keep_best(self, step: int) -> None:
        options = self.trainer.checkpoint
        if options.best is None or self.evaluated_at != step or not self.has_checkpoints:
            return
        value = sign_of(options.direction) * value_of(
            self.last_metrics, options.best, "Checkpointing(best=)"
        )
        better = sum(known <= value for known in self.best)
        if math.isfinite(value) and better < options.keep_best:
            self.best = sorted([*self.best, value])[: options.keep_best]
            self.saves.save("best", **self._beside_state())

    def _obey(self, request: int) -> None:
        self.request = max(self.request, request)
        if request >= LEAVE:
            raise _Left
        if request:
            self.model.stop_training = True

    # ------------------------------------------------------------------ state

    def _beside_state(self) -> dict[str, Any]:
        is_evaluated = self.evaluated_at == self.state.steps_done
        return {
            "info": {"epoch": self.trainer.epoch},
            "metrics": self.last_metrics if is_evaluated else {},
        }

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is, beside what the model's state knows."""
        return {name: getattr(self, name) for name in _SAVED}

    def load_state_dict(self, state: Any) -> None:
        """Go on from there; nothing but what ``state_dict`` gives is taken over."""
        for name, value in known_fields(state, _SAVED, "loop").items():
            setattr(self, name, value)

    # ------------------------------------------------------------------ telling

    def _announce(self) -> None:
        policy = getattr(self.model, "dtype_policy", None)
        name = str(getattr(policy, "name", policy))
        gpus = import_tensorflow().config.list_logical_devices("GPU")
        train = self.train
        self.reporter.emit(
            RunStarted(
                layout=str(self.state.layout),
                world_size=self.state.world.size,
                device="cuda" if gpus else "cpu",
                precision=_PRECISIONS.get(name, name),
                global_batch=train.global_batch,
                parameters=int(self.model.count_params()),
                samples_per_epoch=train.samples if isinstance(train, IndexedData) else None,
                total_steps=self.total_steps,
                first_step=self.state.steps_done,
            )
        )

    def _finish(self) -> History:
        reasons = {GO_ON: "done", STOP: "stopped"}
        reason = reasons.get(self.request, "interrupted")
        step = self.state.steps_done
        if reason == "stopped" and self.stops.reason:
            self.reporter.emit(Note(message=f"stopped at step {step}: {self.stops.reason}"))
        self.reporter.emit(
            RunFinished(
                reason=reason,
                step=step,
                epoch=self.trainer.epoch,
                samples=self.samples,
                seconds=time.perf_counter() - self.started,
                metrics=self.last_metrics,
            )
        )
        return self.reporter.history

    def _each(self, method: str, *arguments: Any) -> None:
        for callback in self.trainer.own_callbacks:
            getattr(callback, method)(self.trainer, *arguments)


def learning_rate(optimizer: Any) -> float:
    """The learning rate of the next step; of a schedule, its value there."""
    rate = getattr(optimizer, "learning_rate", math.nan)
    if callable(rate) and not hasattr(rate, "numpy"):
        rate = rate(optimizer.iterations)
    return float(rate.numpy() if hasattr(rate, "numpy") else rate)
