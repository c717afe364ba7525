"""One call of ``fit`` on one rank: steps, evaluations, checkpoints, and a clean way out."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.sharded.saver import Outcome
from paceline.data import Loader
from paceline.engine import StepResult
from paceline.errors import CheckpointError, NonFiniteError
from paceline.events import (
    CheckpointFailed,
    CheckpointSaved,
    EpochDone,
    EvalDone,
    MemoryMeasured,
    NonFinite,
    Note,
    RunFinished,
    RunStarted,
    StepDone,
)
from paceline.trainer.callbacks import CallbackStates, sign_of, value_of
from paceline.trainer.evaluate import evaluate
from paceline.trainer.history import History
from paceline.trainer.reporting import Reporter
from paceline.trainer.saving import Checkpoints, Restored
from paceline.trainer.splitting import StepSplits
from paceline.trainer.stopping import GO_ON, INTERRUPT, LEAVE, Interrupted, StopRequests

if TYPE_CHECKING:
    from paceline.trainer.trainer import Trainer

_REASONS = {GO_ON: "done", LEAVE: "interrupted", INTERRUPT: "interrupted"}


class Loop:
    """Drives a trainer's engine over its data until there is nothing left to do, or a stop."""

    def __init__(
        self,
        trainer: Trainer,
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
        self.pulse = self.world.pulse
        self.checkpoints = checkpoints
        if checkpoints is not None:
            checkpoints.add("loop", self)
            checkpoints.add("callbacks", CallbackStates(trainer.callbacks, reporter))
        self.started = time.perf_counter()
        self.epoch_loss, self.epoch_samples, self.epoch_seconds = 0.0, 0, 0.0
        self.last_metrics: dict[str, float] = {}
        self.evaluated_at = self.saved_at = -1
        self.evaluation_due = False
        self.best: list[float] = []  # of the metric to keep the best by, smaller is better
        self.samples = 0
        self._steps_run = 0
        self._snapshots_failed = False
        self._snapped_at = -1
        self._longest_save = 0.0
        self._saved_time = time.monotonic()  # clocks on the wall may go back
        self._unreported: list[tuple[int, StepResult, float]] = []

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
        request = GO_ON
        try:
            if self.evaluation_due:  # the run was interrupted in the middle of it
                self._evaluate()
            while request == GO_ON and not self._finished():
                request = self._run_epoch()
            if request < LEAVE:
                self._evaluate()
        except Interrupted:
            request = self.stops.agreed
        if request >= LEAVE:
            self._save_and_leave()
        elif self.trainer.checkpoint.at_end:
            self._save("stop" if request else "end")
        self._report_saves(last=True)
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
            self.splits.after(result.step)
            self._step_done(epoch, result, time.perf_counter() - waited_from)
            over = self.train.epoch > epoch
            if over:
                self._epoch_done(epoch)
            if _due(self.trainer.evaluation.every, result.step):
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

    def _step(self, batch: Any) -> StepResult:
        self._steps_run += 1
        if self._steps_run == 2 and self.checkpoints is not None and self._saves_on_the_way():
            self.checkpoints.reserve()  # the state has had its final size since the first step
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
        if len(self._unreported) > (0 if self.world.device.type == "cpu" else 1):
            self._report(*self._unreported.pop(0))
        self._each("on_step_end", self.trainer, result)

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
            )
        )

    def _epoch_done(self, epoch: int) -> None:
        self._catch_up()
        samples = self.epoch_samples
        loss = self.epoch_loss / samples if samples else math.nan
        seconds = self.epoch_seconds
        self.epoch_loss, self.epoch_samples, self.epoch_seconds = 0.0, 0, 0.0
        self.reporter.emit(
            EpochDone(
                step=self.engine.steps_done,
                epoch=epoch,
                loss=loss,
                samples=samples,
                seconds=seconds,
            )
        )
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
        metrics, samples, seconds = evaluate(
            self.engine,
            self.val,
            self.trainer.metrics,
            batches=self.trainer.evaluation.batches,
            between=self._leave_if_interrupted,
        )
        self.evaluated_at, self.last_metrics, self.evaluation_due = step, metrics, False
        epoch = self.trainer.epoch
        self.reporter.emit(
            EvalDone(step=step, epoch=epoch, metrics=metrics, samples=samples, seconds=seconds)
        )
        self._each("on_evaluate", self.trainer, metrics)
        self._keep_best(metrics)

    def _leave_if_interrupted(self) -> None:
        if self.stops.agree() >= LEAVE:
            raise Interrupted

    def _keep_best(self, metrics: dict[str, float]) -> None:
        options = self.trainer.checkpoint
        if options.best is None or self.checkpoints is None:
            return
        value = sign_of(options.mode) * value_of(metrics, options.best, "Checkpointing(best=)")
        if not math.isfinite(value) or len(self.best) == options.keep_best <= sum(
            known <= value for known in self.best
        ):
            return
        self.best = sorted([*self.best, value])[: options.keep_best]
        self._save("best")

    # ------------------------------------------------------------------ state

    def _save_if_due(self, step: int, *, epoch_over: bool) -> int:
        """Save where it is time to, and hear what the ranks were asked meanwhile."""
        options, checkpoints = self.trainer.checkpoint, self.checkpoints
        if checkpoints is None:
            return self.stops.agree()
        if step and _due(options.memory_every, step):
            self._snapshot(checkpoints)
        if step and _due(options.every, step):
            self._save("every")
        elif epoch_over and options.every_epoch:
            self._save("epoch")
        minutes = options.every_minutes
        passed = (time.monotonic() - self._saved_time) / 60
        agreed = self.stops.agree_after_step(
            save=minutes is not None and self.world.is_main and passed >= minutes,
            busy=checkpoints.busy,
        )
        if agreed.save:
            self._save("minutes" if minutes is not None else "asked")
        elif not agreed.busy:
            self._report_saves()
        return agreed.request

    def _saves_on_the_way(self) -> bool:
        options = self.trainer.checkpoint
        return bool(options.every or options.every_minutes or options.every_epoch)

    def _snapshot(self, checkpoints: Checkpoints) -> None:
        """Keep the state in memory; where there is no room, the run goes on without."""
        if self._snapshots_failed:
            return
        self._catch_up()
        try:
            with self.pulse.during("checkpoint"):
                checkpoints.snapshot()
            self._snapped_at = self.engine.steps_done
        except CheckpointError as error:
            if self.trainer.checkpoint.on_failure == "stop":
                raise
            self._snapshots_failed = True
            step = self.engine.steps_done
            told = f"{error} No more copies are kept in memory in this run."
            self.reporter.emit(CheckpointFailed(step=step, reason="memory", error=told))

    def _save_and_leave(self) -> None:
        """Save because of a signal, and say so where the time may not be enough for it.

        A save of this step that is under way is not begun anew; one of an earlier step comes first.
        """
        grace = self.trainer.grace
        if grace is not None and self.saved_at != self.engine.steps_done:
            self._hear_of_saves(wait=True)
            needed, since = self.stops.most_seconds(self._longest_save)
            if needed > grace - since:
                self._tell_short_of_time(needed, grace, since)
        self._save("stop")

    def _tell_short_of_time(self, needed: float, grace: float, since: float) -> None:
        step = self.engine.steps_done
        told = (
            f"step {step} is being saved, but that took up to {needed:.0f} s so far, and of the "
            f"{grace:.0f} s before the ranks are ended {max(grace - since, 0):.0f} are left"
        )
        if self.trainer.checkpoint.memory_every is not None and self.checkpoints is not None:
            if self._snapped_at != step:
                self._snapshot(self.checkpoints)
            if self._snapped_at == step:
                told += "; a copy is in memory"
        self.reporter.emit(Note(message=told, level="warning"))

    def _save(self, reason: str) -> None:
        """Begin a checkpoint of this step, unless there is one already. A collective."""
        step = self.engine.steps_done
        if self.checkpoints is None or self.saved_at == step:
            return
        self._catch_up()
        self.saved_at = step
        metrics = self.last_metrics if self.evaluated_at == step else {}
        info = {"epoch": self.trainer.epoch}
        self.pulse.pause()
        with self.pulse.during("checkpoint"):
            self.checkpoints.save(reason=reason, metrics=metrics, info=info)
        self._saved_time = time.monotonic()
        if not self.trainer.checkpoint.asynchronous:
            self._report_saves()

    def _report_saves(self, *, last: bool = False) -> None:
        """Tell how saves ended; ``last`` waits for the one being written and wants it good."""
        ended = self._hear_of_saves(wait=last)
        failed = ended[-1].error if ended else None
        if failed is not None and (last or self.trainer.checkpoint.on_failure == "stop"):
            raise CheckpointError(failed)

    def _hear_of_saves(self, *, wait: bool) -> list[Outcome]:
        """As :meth:`tell_saves`, and the callbacks hear of those that are good."""
        ended = self.tell_saves(wait=wait)
        for outcome in ended:
            path = outcome.path
            if outcome.error is None:
                self._each("on_checkpoint", self.trainer, path if "://" in path else Path(path))
        return ended

    def tell_saves(self, *, wait: bool) -> list[Outcome]:
        """Report the saves that ended; with ``wait``, also the one that is being written."""
        if self.checkpoints is None:
            return []
        with self.pulse.during("checkpoint"):
            ended = self.checkpoints.finished(wait=wait)
        for outcome, reason, stalled in ended:
            if outcome.error is not None:
                self.reporter.emit(
                    CheckpointFailed(step=outcome.step, reason=reason, error=outcome.error)
                )
                continue
            self._longest_save = max(self._longest_save, outcome.seconds)
            self.reporter.emit(
                CheckpointSaved(
                    step=outcome.step,
                    path=self._shown(outcome.path),
                    bytes=outcome.bytes,
                    seconds=outcome.seconds,
                    stalled=stalled,
                    reason=reason,
                )
            )
            if outcome.warning is not None:
                self.reporter.emit(Note(level="warning", message=outcome.warning))
        return [outcome for outcome, _, _ in ended]

    def _shown(self, path: str) -> str:
        """As the user wrote the run's folder."""
        run_dir, shown = self.trainer.run_dir, self.trainer.shown_dir
        if run_dir is not None and shown is not None and Path(path).is_relative_to(run_dir):
            return str(shown / Path(path).relative_to(run_dir))
        return path

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is, beside what engine and loader know."""
        return {
            "epoch_loss": self.epoch_loss,
            "epoch_samples": self.epoch_samples,
            "epoch_seconds": self.epoch_seconds,
            "evaluated_at": self.evaluated_at,
            "evaluation_due": self.evaluation_due,
            "last_metrics": self.last_metrics,
            "best": self.best,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        for name, value in state.items():
            setattr(self, name, value)

    def went_on(self, restored: Restored) -> None:
        """A checkpoint was restored: to the bit at the same layout, to rounding at another."""
        self.saved_at = self.engine.steps_done
        self.trainer.epoch = self.train.epoch
        if not restored.has_random:
            self.reporter.emit(
                Note(
                    message=f"resumed from {restored.info.get('layout', 'another layout')} on "
                    f"{self.world.size} ranks: dropout and other randomness on the ranks starts "
                    "new streams"
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

    def _finish(self, reason: str) -> History:
        self._catch_up()
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


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
