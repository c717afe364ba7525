"""The story of a run: what went wrong first, what happened in order, what it cost.

``tell`` is a pure function from events, and what the logs say, to a ``Story``;
``paceline.diagnose.story.report`` writes one down, ``of_run`` tells that of a folder.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.diagnose.story.attempts import AS_ASKED, Attempt, RunFault, faults, split_attempts
from paceline.diagnose.story.causes import RootCause, explain
from paceline.diagnose.story.costs import RunCosts, costs_of
from paceline.diagnose.story.minor_causes import minor_cause
from paceline.diagnose.story.rank_logs import LogFolder, LogSource, NoLogs
from paceline.diagnose.story.run_record import find_run, is_running, read_record
from paceline.diagnose.story.timeline import TimelineEntry, timeline_of
from paceline.events import (
    CheckpointFailed,
    CheckpointSaved,
    EvalDone,
    Event,
    GaveUp,
    PhaseProgress,
    Restarting,
    RunFinished,
    RunStarted,
    StepDone,
)
from paceline.events.wording import phase_progress_text
from paceline.track.pace import Pace


@dataclass(frozen=True)
class RunStatus:
    """How far the run came."""

    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    samples_per_second: float = 0.0
    """Over the last steps."""
    seconds_left: float | None = None
    checkpoints: int = 0
    last_checkpoint: str = ""
    saved_step: int | None = None
    starts: int = 0
    began: float = 0.0
    phase: str = ""
    """What it does between steps, if it does: ``evaluating (40 of 100 batches)``."""
    last_event: str = ""
    last_event_at: float = 0.0


@dataclass(frozen=True)
class Story:
    """What happened in a run.

    ``state`` is ``done``, ``stopped`` (by its own rule), ``interrupted`` (it was told to stop),
    ``running``, ``gave_up``, ``failed`` or ``cut_off`` (no record of its end). ``cause`` is the
    first thing that went wrong, of what ended it where it ended badly; ``ended_by`` the last, where
    that is another. ``faults`` are all that ended an attempt before its time, by kind, in order.
    """

    run: str
    state: str
    facts: RunStatus
    cause: RootCause | None
    ended_by: RootCause | None
    faults: list[str]
    chapters: list[TimelineEntry]
    """What happened, in order."""
    costs: RunCosts
    resume: str = ""
    """The command that goes on with it; empty when there is nothing to go on with."""
    oddities: list[str] = field(default_factory=list)
    told_at: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        told = asdict(self)
        told["costs"] |= {"lost": self.costs.lost, "repeated": self.costs.repeated}
        return told


def tell(
    events: Sequence[Event],
    evidence: LogSource | None = None,
    *,
    run: str = "",
    running: bool = False,
    resumable: bool = True,
    oddities: Sequence[str] = (),
    now: float | None = None,
) -> Story:
    """The story of a run with these events, oldest first; ``running``: it has not ended yet."""
    evidence = evidence or NoLogs()
    attempts = split_attempts(events, running=running)
    state = _state(attempts, running)
    cause, ended_by = _causes(attempts, events, evidence, state)
    goes_on = resumable and state not in ("done", "stopped", "running")
    return Story(
        run=run,
        state=state,
        facts=_facts(attempts, events),
        cause=cause,
        ended_by=ended_by,
        faults=[fault.kind for fault in faults(attempts)],
        chapters=timeline_of(attempts),
        costs=costs_of(attempts),
        resume=f"paceline train --resume {shlex.quote(run)}" if goes_on and run else "",
        oddities=list(oddities),
        told_at=time.time() if now is None else now,
    )


def of_run(path: str | os.PathLike[str] | None = None) -> Story:
    """The story of the run in a folder; without one, of the latest run in ``runs/``."""
    run = find_run(None if path is None else os.fspath(path))
    record = read_record(run)
    return tell(
        record.events,
        LogFolder(run.logs),
        run=str(run),
        running=is_running(run, record.events),
        resumable=run.config.is_file(),
        oddities=record.oddities,
    )


def _state(attempts: Sequence[Attempt], running: bool) -> str:
    if running:
        return "running"
    last = attempts[-1]
    if last.fault is None:
        ends = [e.reason for e in last.events if isinstance(e, RunFinished)]
        return ends[-1] if ends else "cut_off"
    if last.first(GaveUp) is not None:
        return "gave_up"
    if last.fault.kind == "stopped":
        return "interrupted"
    if last.goes_on_by_itself or last.fault.kind == "cut_off":
        return "cut_off"  # it was about to start again when the record ends
    return "failed"


def _causes(
    attempts: Sequence[Attempt], events: Sequence[Event], evidence: LogSource, state: str
) -> tuple[RootCause | None, RootCause | None]:
    """What went wrong first, and what ended the run where that is something else."""
    wrong = [fault for fault in faults(attempts) if fault.kind not in AS_ASKED]
    if not wrong:
        return minor_cause(attempts), None
    ended_badly = state in ("gave_up", "failed", "cut_off")
    chain = _chain(attempts, wrong) if ended_badly else wrong

    def explained(fault: RunFault) -> RootCause:
        times = sum(fault.same_as(other) for other in wrong)
        return explain(fault, evidence, events, times)

    first, last = chain[0], chain[-1]
    is_other = ended_badly and not last.same_as(first)
    return explained(first), explained(last) if is_other else None


def _chain(attempts: Sequence[Attempt], wrong: Sequence[RunFault]) -> Sequence[RunFault]:
    """The faults that led to the end: the last one and those that it came of.

    Those between which nothing new was done belong together; so do those that used up a budget.
    """
    reached, progress = 0, []  # for each fault: was anything new done since the one before?
    for attempt in attempts:
        steps = [e.step for e in attempt.events if isinstance(e, StepDone)]
        if attempt.fault in wrong:
            progress.append(max(steps, default=0) > reached)
        reached = max([reached, *steps])
    first = len(wrong) - 1
    while first > 0 and not progress[first]:
        first -= 1
    return wrong[min(first, _first_of_budget(attempts, wrong)) :]


def _first_of_budget(attempts: Sequence[Attempt], wrong: Sequence[RunFault]) -> int:
    """The first of the faults whose restarts used up the budget; the last one if none did."""
    last = len(wrong) - 1
    restarts = [e for attempt in attempts for e in attempt.events if isinstance(e, Restarting)]
    counted = [e for e in restarts if e.reason in ("failure", "hang")]
    used_up = bool(counted) and counted[-1].used == counted[-1].budget
    if not used_up or attempts[-1].first(GaveUp) is None or wrong[-1].kind == "nonfinite":
        return last
    charged = [i for i, fault in enumerate(wrong) if fault.kind in ("failure", "hang")]
    row = charged[-(counted[-1].used + 1) :]
    return row[0] if row else last


def _facts(attempts: Sequence[Attempt], events: Sequence[Event]) -> RunStatus:
    pace = Pace()
    step = total = loss = None
    phase = ""
    for event in events:
        if isinstance(event, PhaseProgress):
            phase = phase_progress_text(event)
        elif isinstance(event, StepDone | EvalDone | CheckpointSaved | CheckpointFailed):
            phase = ""
        if isinstance(event, StepDone):
            pace.add(event)
            step, loss = event.step, event.loss
        elif isinstance(event, RunStarted):
            total = event.total_steps
            step = event.first_step
    saved = [e for e in events if isinstance(e, CheckpointSaved)]
    return RunStatus(
        step=step or 0,
        total_steps=total,
        loss=loss,
        samples_per_second=pace.samples_per_second,
        seconds_left=pace.seconds_left(total),
        checkpoints=len({e.step for e in saved}),
        last_checkpoint=saved[-1].path if saved else "",
        saved_step=saved[-1].step if saved else None,
        starts=len(attempts),
        began=events[0].time,
        phase=phase,
        last_event=type(events[-1]).__name__,
        last_event_at=events[-1].time,
    )
