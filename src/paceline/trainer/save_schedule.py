"""When a run saves its state, and what it tells of that."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.checkpoint.checkpoints import Checkpoints
from paceline.checkpoint.sharded.async_saver import SaveOutcome
from paceline.errors import CheckpointError, NotSaved
from paceline.events import CheckpointFailed, CheckpointSaved, Note, PhaseProgress
from paceline.sync.deferred_numbers import LAG
from paceline.trainer.base import TrainerBase
from paceline.trainer.reporting import Reporter
from paceline.trainer.stop_requests import LEAVE, StopRequests

_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 30.0, 600.0
"""After how long a save that failed is tried again, while the run goes on."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 5.0
"""The same at the end of the run, when there is nothing else to do."""
_POLL_SECONDS = 0.1


class Saves:
    """The checkpoints of one call of ``fit``; does nothing where the run keeps none.

    ``catch_up`` reports what has been done so far, which comes before a save; ``each`` calls a
    method of every callback.
    """

    def __init__(
        self,
        trainer: TrainerBase,
        checkpoints: Checkpoints | None,
        reporter: Reporter,
        stops: StopRequests,
        *,
        catch_up: Callable[[], None],
        each: Callable[..., None],
    ) -> None:
        self.trainer, self.engine = trainer, trainer.engine
        self.checkpoints = checkpoints
        self.reporter, self.stops = reporter, stops
        self.pulse = trainer.engine.world.pulse
        self.saved_at = -1
        self._catch_up, self._each = catch_up, each
        self._snapshots_failed = False
        self._snapped_at = -1
        self._failed: str | None = None  # why the last save failed
        self._longest_save = 0.0
        self._last_good: tuple[int, str] | None = None
        self._retry_after = _FIRST_RETRY_SECONDS
        self._retry_at: float | None = None
        self._told_begin_failed = False
        self._saved_time = time.monotonic()  # clocks on the wall may go back

    def if_due(
        self, step: int, *, epoch_over: bool, info: dict[str, Any], metrics: dict[str, float]
    ) -> int:
        """Save where it is time to, and hear what the ranks were asked meanwhile."""
        options, checkpoints = self.trainer.checkpoint, self.checkpoints
        if checkpoints is None:
            return self.stops.agree_after_step(later=self.engine.in_round).request
        if step and due(options.memory_every, step):
            self._snapshot(checkpoints)
        if step and due(options.every, step):
            self.save("every", info, metrics)
        elif epoch_over and due(options.epochs_between, info["epoch"] + 1):
            self.save("epoch", info, metrics)
        minutes = options.every_minutes
        passed = (time.monotonic() - self._saved_time) / 60
        # After a save all ranks are here: what they asked before it is heard now.
        later = self.engine.in_round and self.saved_at != step
        is_time = minutes is not None and passed >= minutes
        is_time |= self._retry_at is not None and time.monotonic() >= self._retry_at
        agreed = self.stops.agree_after_step(
            save=self.engine.world.is_main and is_time,
            busy=checkpoints.busy,
            later=later,
        )
        if agreed.save:
            by_itself = "minutes" if minutes is not None else "asked"
            self.save("retry" if self._retry_at is not None else by_itself, info, metrics)
        elif not agreed.busy and (not later or step - LAG > self.saved_at):
            self.report()  # all ranks are through with the last save, and were when they said so
        return agreed.request

    def reserve(self) -> None:
        """Get the memory for saves on the way: the state has its final size after a step."""
        options = self.trainer.checkpoint
        on_the_way = options.every or options.every_minutes or options.epochs_between
        if self.checkpoints is not None and on_the_way:
            self.checkpoints.reserve()

    def begin(self) -> None:
        """After the first step: see early whether the run can save at all. A collective."""
        if self.checkpoints is None or self.checkpoints.has_begun:
            return
        try:
            self.checkpoints.begin()
        except CheckpointError as error:
            if self.trainer.checkpoint.on_failure == "stop":
                raise
            if not self._told_begin_failed:
                self._told_begin_failed = True
                self._tell_failed(self.engine.steps_done, "begin", str(error))

    def went_on_from(self, step: int, path: str) -> None:
        """The run goes on from a checkpoint, which is its last good state so far."""
        self.saved_at, self._last_good = step, (step, path)

    def _snapshot(self, checkpoints: Checkpoints) -> None:
        """Keep the state in memory; where there is no room, the run goes on without."""
        self.begin()
        if self._snapshots_failed or not checkpoints.has_begun:
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

    def save_and_leave(self, info: dict[str, Any], metrics: dict[str, float]) -> None:
        """Save because of a signal, and say so where the time may not be enough for it.

        A save of this step that is under way is not begun anew; one of an earlier step comes first.
        """
        grace = self.trainer.grace
        if grace is not None and self.saved_at != self.engine.steps_done:
            self._hear(wait=True)
            needed, since = self.stops.most_seconds(self._longest_save)
            if needed > grace - since:
                self._tell_short_of_time(needed, grace, since)
        self.save("stop", info, metrics)

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

    def save(self, reason: str, info: dict[str, Any], metrics: dict[str, float]) -> None:
        """Begin a checkpoint of this step, unless there is one already. A collective."""
        step = self.engine.steps_done
        if self.checkpoints is None or self.saved_at == step:
            return
        self._catch_up()
        self.saved_at = step
        self.pulse.pause()
        self._retry_at = None
        self.reporter.emit(PhaseProgress(phase="checkpoint", step=step))
        try:
            with self.pulse.during("checkpoint"):
                self.checkpoints.save(reason=reason, metrics=metrics, info=info)
        except CheckpointError as error:  # nothing was begun, on any rank
            self._tell_failed(step, reason, str(error))
            if self.trainer.checkpoint.on_failure == "stop":
                raise
            return
        self._saved_time = time.monotonic()
        if not self.trainer.checkpoint.asynchronous:
            self.report()

    def report(self) -> None:
        """Tell how saves ended."""
        ended = self._hear(wait=False)
        failed = ended[-1].error if ended else None
        if failed is not None and self.trainer.checkpoint.on_failure == "stop":
            raise NotSaved(self._what_is_lost(failed))

    def finish(
        self, reason: str | None, *, leaving: bool, info: dict[str, Any], metrics: dict[str, float]
    ) -> None:
        """Save for the last time (not at all without a ``reason``), and see that it is good.

        Where the storage refuses, it is tried again for a while, unless the ranks are ``leaving``
        because of a signal. Raises ``NotSaved``, on all ranks, where it fails for good.
        """
        self._failed = None
        if reason is not None:
            self.save(reason, info, metrics)
        self._hear(wait=True)
        if self._failed is None:
            return
        deadline = time.monotonic() + (0.0 if leaving else self.trainer.checkpoint.retry_seconds)
        if not leaving:
            self._ask_for_room(self._failed)
        pause = _FIRST_PAUSE_SECONDS
        while self._failed is not None and self._go_on_trying(deadline, pause):
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            self._failed = None
            self.save(reason or "retry", info, metrics)
            self._hear(wait=True)
        if self._failed is not None:
            raise NotSaved(self._what_is_lost(self._failed))

    def _ask_for_room(self, error: str) -> None:
        seconds = self.trainer.checkpoint.retry_seconds
        if seconds:
            told = (
                f"the training is over, but step {self.engine.steps_done} is not saved yet. It is "
                f"tried again for {seconds:g} s (checkpoint.retry_seconds): {error}"
            )
            self.reporter.emit(Note(level="warning", message=told))

    def _go_on_trying(self, deadline: float, pause: float) -> bool:
        """Wait a moment; whether there is time for another try. All ranks go by the first one's."""
        self.pulse.pause()
        end = time.monotonic() + pause
        while time.monotonic() < end and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        over = self.engine.world.is_main and time.monotonic() >= deadline
        # A request is the way in which ranks come to agree; a signal ends the waiting as well.
        if over:
            self.stops.ask(LEAVE)
        return self.stops.agree() < LEAVE

    def _what_is_lost(self, error: str) -> str:
        """The error at the end of a run whose last state is lost, and where the one before is."""
        step = self.engine.steps_done
        wanted = self.trainer.checkpoint.memory_every is not None and self._snapped_at != step
        if wanted and self.checkpoints is not None:
            self._snapshot(self.checkpoints)
        if self._snapped_at == step:
            left = f"A copy of step {step} is in memory, from which a resume goes on: make room, "
            left += "and resume before this machine is restarted."
        elif self._last_good is not None:
            good, path = self._last_good
            left = f"The last good state is that of step {good}: {self._shown(path)}"
        else:
            left = "Nothing of this run has been saved."
        return f"step {step} is NOT saved: {error} {left}"

    def _tell_failed(self, step: int, reason: str, error: str) -> None:
        """A save failed: it is told, and tried again after a while."""
        self._failed = error
        if self.saved_at == step:
            self.saved_at = -1
        self._retry_at = time.monotonic() + self._retry_after
        self._retry_after = min(2 * self._retry_after, _LONGEST_RETRY_SECONDS)
        self.reporter.emit(CheckpointFailed(step=step, reason=reason, error=error))

    def _hear(self, *, wait: bool) -> list[SaveOutcome]:
        """As ``tell``, and the callbacks hear of those that are good."""
        ended = self.tell(wait=wait)
        for outcome in ended:
            path = outcome.path
            if outcome.error is None:
                self._each("on_checkpoint", self.trainer, path if "://" in path else Path(path))
        return ended

    def tell(self, *, wait: bool) -> list[SaveOutcome]:
        """Report the saves that ended; with ``wait``, also the one that is being written."""
        if self.checkpoints is None:
            return []
        with self.pulse.during("checkpoint"):
            ended = self.checkpoints.finished(wait=wait)
        for outcome, reason, stalled in ended:
            if outcome.error is not None:
                self._tell_failed(outcome.step, reason, outcome.error)
                continue
            self._failed, self._retry_at = None, None
            self._retry_after = _FIRST_RETRY_SECONDS
            self._last_good = outcome.step, outcome.path
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


def due(every: int | None, step: int) -> bool:
    """Whether what comes ``every`` so many steps comes after ``step``."""
    return every is not None and step % every == 0
