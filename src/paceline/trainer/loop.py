"""One call of ``fit`` on one rank: steps, evaluations, checkpoints, and a clean way out."""

from __future__ import annotations

import math
import time
from typing import Any

from paceline.checkpoint.checkpoints import Checkpoints, Restored
from paceline.data import Loader
from paceline.engine import StepResult
from paceline.engine.internals import internals_of
from paceline.engine.logged import LoggedByName, LoggedValue
from paceline.errors import LaunchError, NonFiniteError
from paceline.events import (
    EpochDone,
    EvalDone,
    Logged,
    MemoryMeasured,
    NonFinite,
    Note,
    RunFinished,
    RunStarted,
    StepDone,
)
from paceline.log_values import REDUCTIONS
from paceline.sync.deferred_numbers import LAG
from paceline.trainer.base import TrainerBase
from paceline.trainer.callbacks import CallbackStates, sign_of, value_of
from paceline.trainer.evaluate import evaluate
from paceline.trainer.history import History
from paceline.trainer.pass_progress import PassProgress
from paceline.trainer.reporting import Reporter
from paceline.trainer.save_schedule import Saves, due
from paceline.trainer.saved_fields import (
    Fits,
    is_count,
    is_metrics,
    is_number,
    is_whole,
    known_fields,
)
from paceline.trainer.step_timing import StepSplits
from paceline.trainer.stop_requests import GO_ON, INTERRUPT, LEAVE, Interrupted, StopRequests
from paceline.trainer.sync_notes import starting_notes
from paceline.trainer.sync_reports import WireReports


def _is_logged(value: Any) -> bool:
    is_three = isinstance(value, list) and len(value) == 3
    return is_three and is_number(value[0]) and is_number(value[1]) and value[2] in REDUCTIONS


_SAVED: dict[str, Fits] = {
    "epoch_loss": is_number,
    "epoch_samples": is_count,
    "epoch_seconds": is_number,
    "epoch_logged": lambda value: isinstance(value, dict) and all(map(_is_logged, value.values())),
    "evaluated_at": is_whole,
    "evaluation_due": lambda value: isinstance(value, bool),
    "last_metrics": is_metrics,
    "best": lambda value: isinstance(value, list) and all(map(is_number, value)),
}
"""What a checkpoint keeps of the loop, by attribute, and what each may be."""

_REASONS = {GO_ON: "done", LEAVE: "interrupted", INTERRUPT: "interrupted"}


class Loop:
    """Drives a trainer's engine over its data until there is nothing left to do, or a stop."""

    def __init__(
        self,
        trainer: TrainerBase,
        train: Loader,
        val: Loader | None,
        *,
        total_steps: int | None,
        epochs: int | None,
        reporter: Reporter,
        stops: StopRequests,
        checkpoints: Checkpoints | None,
    ) -> None:
        self.trainer = trainer
        self.engine = trainer.engine
        self.world = trainer.engine.world
        self.train, self.val = train, val
        self.total_steps, self.epochs = total_steps, epochs
        self.reporter, self.stops = reporter, stops
        self.splits = StepSplits(self.engine, trainer.split_every, reporter.emit)
        self.wire = WireReports(self.engine, reporter.emit)
        self.pulse = self.world.pulse
        self.checkpoints = checkpoints
        if checkpoints is not None:
            checkpoints.add("loop", self)
            checkpoints.add("callbacks", CallbackStates(trainer.callbacks, reporter))
        self.saves = Saves(
            trainer, checkpoints, reporter, stops, catch_up=self._catch_up, each=self._each
        )
        self.started = time.perf_counter()
        self.epoch_loss, self.epoch_samples, self.epoch_seconds = 0.0, 0, 0.0
        self.last_metrics: dict[str, float] = {}
        self.evaluated_at = -1
        self.evaluation_due = False
        self.best: list[float] = []  # of the metric to keep the best by, smaller is better
        self.samples = 0
        self._steps_run = 0
        self._unreported: list[tuple[int, StepResult, float]] = []
        self.epoch_logged: dict[str, list[Any]] = {}  # name: total, count, how they are reduced

    def run(self) -> History:
        """Train to the end, or to where the ranks agreed to stop."""
        try:
            return self._run()
        except NonFiniteError as error:
            self.reporter.emit(
                NonFinite(
                    step=error.step,
                    what=error.what,
                    ranks=list(error.ranks),
                    action="stop",
                    detail=str(error),
                )
            )
            raise

    def _run(self) -> History:
        self._announce()
        self._each("on_fit_start", self.trainer)
        request = self.stops.agree()
        try:
            if self.evaluation_due:  # the run was interrupted in the middle of it
                self._evaluate()
            while request == GO_ON and not self._finished():
                request = self._run_epoch()
            if request < LEAVE:
                self._meet()
                self._evaluate()
        except Interrupted:
            request = self.stops.agreed
        last = None
        if request >= LEAVE or self.trainer.checkpoint.save_at_end:
            last = "stop" if request else "end"
        if request >= LEAVE:
            self.saves.save_and_leave(**self._beside_state())
        elif last is not None:
            self._save(last)
        self.splits.finish()
        self.wire.finish()
        self._accept()
        self.saves.finish(last, leaving=request >= LEAVE, **self._beside_state())
        history = self._finish(_REASONS.get(request, "stopped"))
        self._each("on_fit_end", self.trainer, history)
        return history

    def _finished(self) -> bool:
        if self.epochs is not None:  # not by steps: a resumed run may have another global batch
            return self.train.epoch >= self.epochs
        return self.total_steps is not None and self.engine.steps_done >= self.total_steps

    def _run_epoch(self) -> int:
        """Steps up to the end of the epoch, or of the run; what the ranks agreed on."""
        over = False
        waited_from = time.perf_counter()
        self.pulse.enter("data")
        for batch in self.train:
            self.pulse.enter("other")
            epoch = self.trainer.epoch = self._epoch_of_batch()
            result = self._step(batch)
            self.pulse.enter("other")
            if self._steps_run == 1:
                self.stops.agree()  # all ranks have done a step with the settings they were given
                self._accept()
                self.saves.begin()
            self.splits.after(result.step)
            self.wire.after(result.step)
            for message in self.engine.take_notes():
                self.reporter.emit(Note(message=message))
            self._step_done(epoch, result, time.perf_counter() - waited_from)
            if self._finished():
                self._meet()
            over = self.train.epoch > epoch
            if over:
                self._epoch_done(epoch)
            if due(self.trainer.evaluation.every, result.step):
                self._evaluate()
            request = self._save_if_due(result.step, epoch_over=over)
            if request != GO_ON or self._finished():
                return request
            waited_from = time.perf_counter()
            self.pulse.enter("data")
        if not over:  # a stream tells that it has ended only when asked for more
            self._epoch_done(self.trainer.epoch)
            return self._save_if_due(0, epoch_over=True)
        return self.stops.agree()

    def _accept(self) -> None:
        """Tell that the settings hold; where that fails it is tried again at the end."""
        if self.trainer.when_accepted is None:
            return
        try:
            self.trainer.when_accepted()
            self.trainer.when_accepted = None
        except LaunchError as error:
            told = f"{error} Until then a resume would go on with the settings from before."
            self.reporter.emit(Note(message=told, level="warning"))

    def _step(self, batch: Any) -> StepResult:
        self._steps_run += 1
        if self._steps_run == 2:
            self.saves.reserve()
        # The second: the first spreads the model and makes the optimizer's state.
        if not self.trainer.measure_memory or self._steps_run != 2:
            return self.engine.step(batch)
        with self.engine.measuring_memory():
            result = self.engine.step(batch)
        ranks = self.engine.memory()
        self.reporter.emit(
            MemoryMeasured(
                step=result.step,
                parameters=[memory.parameters for memory in ranks],
                gradients=[memory.gradients for memory in ranks],
                optimizer=[memory.optimizer for memory in ranks],
                buffers=[memory.buffers for memory in ranks],
                activations=[memory.activations or 0 for memory in ranks],
                peak=[memory.peak or 0 for memory in ranks],
                current=[memory.current for memory in ranks],
            )
        )
        return result

    def _epoch_of_batch(self) -> int:
        share = self.train.share
        assert share is not None  # a batch has just been drawn
        return share.epoch

    def _step_done(self, epoch: int, result: StepResult, seconds: float) -> None:
        self._unreported.append((epoch, result, seconds))
        # Reading a loss waits for the GPU: read the one before, while the GPU works on this one.
        # In a round of local steps it waits for the other replicas: they may be steps behind.
        behind = 0 if self.world.device.type == "cpu" else 1
        while len(self._unreported) > (LAG if self.engine.in_round else behind):
            self._report(*self._unreported.pop(0))
        self._each("on_step_end", self.trainer, result)

    def _meet(self) -> None:
        """At the end replicas that trained alone become one model; what was done before is old."""
        if self.engine.meet():
            self.evaluated_at = self.saves.saved_at = -1

    def _catch_up(self) -> None:
        """Report what has been done so far, before anything that depends on it."""
        self.engine.settle()
        while self._unreported:
            self._report(*self._unreported.pop(0))

    def _report(self, epoch: int, result: StepResult, seconds: float) -> None:
        loss, samples = result.loss, result.samples
        self.samples += samples
        self.epoch_seconds += seconds
        if math.isfinite(loss):
            self.epoch_loss += loss * samples
            self.epoch_samples += samples
        if result.problem is not None and not result.problem.overflow:
            self.reporter.emit(
                NonFinite(
                    step=result.step,
                    what=result.problem.what,
                    ranks=result.problem.ranks,
                    action="skip",
                    detail=result.problem.detail,
                )
            )
        if late := result.log_values(late=True):
            self._tell_logged(result.step - 1, late)
        logged = result.log_values()
        self._log_for_epoch(logged)
        self.reporter.emit(
            StepDone(
                step=result.step,
                epoch=epoch,
                loss=loss,
                lr=result.lr,
                samples=samples,
                seconds=seconds,
                grad_norm=result.grad_norm,
                skipped=result.skipped,
                logged={name: one.value for name, one in logged.items()},
            )
        )

    def _log_for_epoch(self, logged: LoggedByName) -> None:
        for name, one in logged.items():
            known = self.epoch_logged.get(name)
            joined = one if known is None else LoggedValue(*known).joined(one)
            self.epoch_logged[name] = [joined.total, joined.count, joined.reduce]

    def _tell_logged(self, step: int, logged: LoggedByName) -> None:
        values = {name: one.value for name, one in logged.items()}
        self.reporter.emit(Logged(step=step, values=values))

    def _flush_logged(self) -> None:
        """Report what was logged since the last step, or by replicas that train alone."""
        if logged := internals_of(self.engine).context.microbatches.logs.flush():
            self._tell_logged(self.engine.steps_done, logged)

    def _epoch_done(self, epoch: int) -> None:
        self._catch_up()
        samples = self.epoch_samples
        loss = self.epoch_loss / samples if samples else math.nan
        seconds = self.epoch_seconds
        self.epoch_loss, self.epoch_samples, self.epoch_seconds = 0.0, 0, 0.0
        logged = {name: LoggedValue(*one).value for name, one in self.epoch_logged.items()}
        self.epoch_logged = {}
        self.reporter.emit(
            EpochDone(
                step=self.engine.steps_done,
                epoch=epoch,
                loss=loss,
                samples=samples,
                seconds=seconds,
                logged=logged,
            )
        )
        self.engine.epoch_done()
        if self.engine.in_round:
            self._flush_logged()
        self._each("on_epoch_end", self.trainer, epoch)
        if self.trainer.evaluation.every is None:
            self._evaluate()

    # ------------------------------------------------------------------ evaluation

    def _evaluate(self) -> None:
        step = self.engine.steps_done
        if self.val is None or self.evaluated_at == step:
            return
        self._catch_up()
        self.evaluation_due = True
        batches = self.trainer.evaluation.batches
        progress = PassProgress(self.reporter.emit, "evaluation", step, self.val, batches)
        metrics, samples, seconds = evaluate(
            self.engine,
            self.val,
            self.trainer.metrics,
            progress=progress,
            batches=batches,
            between=self._leave_if_interrupted,
        )
        self.evaluated_at, self.last_metrics, self.evaluation_due = step, metrics, False
        epoch = self.trainer.epoch
        self.reporter.emit(
            EvalDone(step=step, epoch=epoch, metrics=metrics, samples=samples, seconds=seconds)
        )
        self.engine.evaluated(metrics)
        self._each("on_evaluate", self.trainer, metrics)
        self._keep_best(metrics)

    def _leave_if_interrupted(self) -> None:
        if self.stops.agree() >= LEAVE:
            raise Interrupted

    def _keep_best(self, metrics: dict[str, float]) -> None:
        options = self.trainer.checkpoint
        if options.best is None or self.checkpoints is None:
            return
        value = sign_of(options.direction) * value_of(metrics, options.best, "Checkpointing(best=)")
        if not math.isfinite(value) or len(self.best) == options.keep_best <= sum(
            known <= value for known in self.best
        ):
            return
        self.best = sorted([*self.best, value])[: options.keep_best]
        self._save("best")

    # ------------------------------------------------------------------ state

    def _save_if_due(self, step: int, *, epoch_over: bool) -> int:
        return self.saves.if_due(step, epoch_over=epoch_over, **self._beside_state())

    def _save(self, reason: str) -> None:
        self.saves.save(reason, **self._beside_state())

    def _beside_state(self) -> dict[str, Any]:
        """What a checkpoint of this step says of it, beside the state."""
        is_evaluated = self.evaluated_at == self.engine.steps_done
        return {
            "info": {"epoch": self.trainer.epoch},
            "metrics": self.last_metrics if is_evaluated else {},
        }

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is, beside what engine and loader know."""
        return {name: getattr(self, name) for name in _SAVED}

    def load_state_dict(self, state: Any) -> None:
        """Go on from there; nothing but what ``state_dict`` gives is taken over."""
        for name, value in known_fields(state, _SAVED, "loop").items():
            setattr(self, name, value)

    def went_on(self, restored: Restored) -> None:
        """A checkpoint was restored: bitwise at the same layout, to rounding at another."""
        self.saves.went_on_from(self.engine.steps_done, restored.path)
        self.trainer.epoch = self.train.epoch
        if not restored.has_random:
            randomness = internals_of(self.engine).replica.randomness
            if randomness is None or randomness.off:
                self.reporter.emit(
                    Note(
                        message=f"resumed from {restored.info.get('layout', 'another layout')} on "
                        f"{self.world.size} ranks: dropout and other randomness on the ranks "
                        "starts new streams"
                    )
                )
            self.world.seed(self.trainer.seed + self.engine.steps_done)

    # ------------------------------------------------------------------ telling

    def _announce(self) -> None:
        engine = self.engine
        self.pulse.step = engine.steps_done
        self.reporter.emit(
            RunStarted(
                layout=str(engine.layout),
                world_size=self.world.size,
                device=str(self.world.device),
                precision=engine.options["precision"],
                global_batch=self.train.global_batch,
                parameters=engine.parameter_count,
                samples_per_epoch=self.train.samples_per_epoch,
                total_steps=self.total_steps,
                first_step=engine.steps_done,
            )
        )
        for note in starting_notes(engine, self.total_steps):
            self.reporter.emit(note)

    def _finish(self, reason: str) -> History:
        self._catch_up()
        self._flush_logged()
        if reason == "stopped" and self.stops.reason:
            step = self.engine.steps_done
            self.reporter.emit(Note(message=f"stopped at step {step}: {self.stops.reason}"))
        self.reporter.emit(
            RunFinished(
                reason=reason,
                step=self.engine.steps_done,
                epoch=self.trainer.epoch,
                samples=self.samples,
                seconds=time.perf_counter() - self.started,
                metrics=self.last_metrics,
            )
        )
        return self.reporter.history

    def _each(self, method: str, *arguments: Any) -> None:
        if self.trainer.callbacks:
            with self.pulse.during("callbacks"):
                for callback in self.trainer.callbacks:
                    getattr(callback, method)(*arguments)
