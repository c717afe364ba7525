"""The events of a run cut into attempts: each start of its ranks, and what ended it.

Pure functions over events; everything else that tells the story of a run builds on them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from paceline.events import (
    CheckpointFailed,
    Event,
    GaveUp,
    HangFound,
    HangOver,
    NodeLeft,
    NonFinite,
    RankLost,
    RanksStarted,
    Restarting,
    RestoreTried,
    RunFailed,
    RunFinished,
    RunStarted,
    StepDone,
)

AS_ASKED = frozenset({"stopped", "preemption", "node_joined"})
"""Ends that somebody wanted: nothing is wrong with the run."""


@dataclass(frozen=True)
class RunFault:
    """What ended an attempt before its time.

    ``kind`` is ``failure``, ``hang``, ``node_lost``, ``nonfinite``, ``cut_off`` (the record just
    ends) or one of ``AS_ASKED``. ``step`` is the last one done; ``attempt`` finds its logs.
    """

    kind: str
    time: float
    attempt: int
    step: int | None = None
    rank: int | None = None
    host: str = ""
    error: str = ""
    exit_code: int | None = None
    log: str = ""
    hang: HangFound | None = None
    nonfinite: NonFinite | None = None
    unsaved: CheckpointFailed | None = None
    """A checkpoint that could not be written before it; may be the first sign of the same."""

    @property
    def signal(self) -> str:
        """The signal that killed the rank, like ``SIGKILL``; empty when none did."""
        if self.exit_code is None or self.exit_code >= 0:
            return ""
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:
            return f"signal {-self.exit_code}"

    def same_as(self, other: RunFault) -> bool:
        """Whether it is the same thing at the same step once more."""
        return (self.kind, self.rank_error, self.step) == (
            other.kind,
            other.rank_error,
            other.step,
        )

    @property
    def rank_error(self) -> str:
        """The error without what differs from start to start."""
        return self.hang.what if self.hang else self.error


@dataclass
class Attempt:
    """One start of the ranks and everything up to the next."""

    events: list[Event] = field(default_factory=list)
    fault: RunFault | None = None
    """What ended it; ``None`` when it ended well, or has not ended."""

    @property
    def began(self) -> float:
        """When its ranks were started."""
        return self.events[0].time

    @property
    def ended(self) -> float:
        """When its last event came."""
        return self.events[-1].time

    @property
    def number(self) -> int:
        """Its number in the names of log folders; 0 when no launcher said."""
        started = self.first(RanksStarted)
        return started.attempt if isinstance(started, RanksStarted) else 0

    @property
    def goes_on_by_itself(self) -> bool:
        """Whether the launcher decided to start the ranks again."""
        return self.first(Restarting) is not None

    def first(self, *kinds: type[Event]) -> Event | None:
        """The first event of one of these kinds."""
        return next((e for e in self.events if isinstance(e, kinds)), None)

    def last_step(self) -> StepDone | None:
        """The last step it did."""
        return next((e for e in reversed(self.events) if isinstance(e, StepDone)), None)


def split_attempts(events: Iterable[Event], *, running: bool = False) -> list[Attempt]:
    """The attempts of a run, oldest first; ``running``: the last one has not ended yet."""
    attempts: list[Attempt] = []
    for event in events:
        if not attempts or _begins_attempt(event, attempts[-1]):
            attempts.append(Attempt())
        attempts[-1].events.append(event)
    reached: int | None = None
    for index, attempt in enumerate(attempts):
        is_last = index == len(attempts) - 1
        last = attempt.last_step()
        reached = last.step if last is not None else _first_step(attempt, reached)
        attempt.fault = _fault_of(attempt, reached, ended=not (is_last and running))
    return attempts


def faults(attempts: Sequence[Attempt]) -> list[RunFault]:
    """What ended attempts before their time, oldest first."""
    return [attempt.fault for attempt in attempts if attempt.fault is not None]


def standstills(attempt: Attempt) -> list[tuple[HangFound, HangOver | None]]:
    """The hangs of an attempt, each with the event that ended it, where it went on by itself.

    A hang that is reported again while it lasts is one hang, with its last report.
    """
    found: list[tuple[HangFound, HangOver | None]] = []
    lasts = False
    for event in attempt.events:
        if isinstance(event, HangFound):
            if lasts:
                found.pop()
            found.append((event, None))
            lasts = True
        elif isinstance(event, HangOver) and lasts:
            found[-1] = (found[-1][0], event)
            lasts = False
        elif isinstance(event, StepDone) and lasts:
            over = HangOver(step=event.step, seconds=found[-1][0].seconds, time=event.time)
            found[-1] = (found[-1][0], over)
            lasts = False
    return found


def _begins_attempt(event: Event, current: Attempt) -> bool:
    """Ranks are started; or, where no launcher says so, something that only a start does."""
    if isinstance(event, RanksStarted):
        return current.first(RanksStarted, RunStarted, RestoreTried) is not None
    if isinstance(event, RunStarted | RestoreTried):
        return current.first(RunStarted) is not None
    return False


def _first_step(attempt: Attempt, reached: int | None) -> int | None:
    """The step that an attempt which did none went on from."""
    started = attempt.first(RunStarted)
    return started.first_step if isinstance(started, RunStarted) else reached


def _fault_of(attempt: Attempt, step: int | None, *, ended: bool) -> RunFault | None:
    """What ended an attempt, from the event that says most about it."""
    unsaved = attempt.first(CheckpointFailed)
    base = RunFault(
        kind="cut_off",
        time=attempt.ended,
        attempt=attempt.number,
        step=step,
        unsaved=unsaved if isinstance(unsaved, CheckpointFailed) else None,
    )
    ways = (_of_hang, _of_nonfinite, _of_lost_rank, _of_restart, _of_lost_node, _of_failure)
    for way in ways:
        if (fault := way(attempt, base)) is not None:
            return fault
    finished = [e for e in attempt.events if isinstance(e, RunFinished)]
    if finished and finished[-1].reason == "interrupted":
        return replace(base, kind="stopped", time=finished[-1].time)
    return base if ended and not finished else None


def _of_hang(attempt: Attempt, base: RunFault) -> RunFault | None:
    hangs = standstills(attempt)
    if not hangs or hangs[-1][1] is not None:
        return None
    hang = hangs[-1][0]
    if any(isinstance(e, RunFinished) and e.reason != "interrupted" for e in attempt.events):
        return None
    lost = attempt.first(RankLost)
    if not hang.seconds or (isinstance(lost, RankLost) and lost.cause != "hang"):
        return None
    return replace(
        base,
        kind="hang",
        time=hang.time,
        rank=hang.ranks[0] if hang.ranks else None,
        host=lost.host if isinstance(lost, RankLost) else "",
        log=lost.log if isinstance(lost, RankLost) else "",
        error=hang.summary,
        hang=hang,
    )


def _of_nonfinite(attempt: Attempt, base: RunFault) -> RunFault | None:
    for event in attempt.events:
        if isinstance(event, NonFinite) and event.action == "stop":
            rank = event.ranks[0] if event.ranks else None
            error = f"NaN or Inf in the {event.what}"
            return replace(
                base, kind="nonfinite", time=event.time, rank=rank, error=error, nonfinite=event
            )
    return None


_CAUSES = {"failed": "failure", "hang": "hang", "node": "node_lost"}


def _of_lost_rank(attempt: Attempt, base: RunFault) -> RunFault | None:
    lost = attempt.first(RankLost)
    if not isinstance(lost, RankLost):
        return None
    return replace(
        base,
        kind=_CAUSES.get(lost.cause, "failure"),
        time=lost.time,
        step=lost.step if lost.step is not None else base.step,
        rank=_rank(lost.rank),
        host=lost.host,
        error=lost.error,
        exit_code=lost.exit_code,
        log=lost.log,
        hang=_seen_before(attempt),
    )


def _seen_before(attempt: Attempt) -> HangFound | None:
    """What was seen to be wrong between the ranks before one was lost, and was not over."""
    hangs = standstills(attempt)
    return hangs[-1][0] if hangs and hangs[-1][1] is None else None


def _of_restart(attempt: Attempt, base: RunFault) -> RunFault | None:
    restart = attempt.first(Restarting)
    if not isinstance(restart, Restarting):
        return None
    left = attempt.first(NodeLeft)
    host = left.host if isinstance(left, NodeLeft) else ""
    # What ended the attempt came before the decision to start it again.
    ended = attempt.first(RunFinished, NodeLeft, RunFailed, Restarting)
    time = min(restart.time, ended.time) if ended is not None else restart.time
    return replace(base, kind=restart.reason, time=time, error=restart.detail, host=host)


def _of_lost_node(attempt: Attempt, base: RunFault) -> RunFault | None:
    left = [e for e in attempt.events if isinstance(e, NodeLeft) and e.reason == "lost"]
    if not left or attempt.first(RunFinished) is not None:
        return None
    return replace(base, kind="node_lost", time=left[0].time, host=left[0].host)


def _of_failure(attempt: Attempt, base: RunFault) -> RunFault | None:
    failed = attempt.first(RunFailed)
    if isinstance(failed, RunFailed):
        return replace(
            base,
            kind="failure",
            time=failed.time,
            rank=_rank(failed.rank),
            error=failed.error,
            exit_code=failed.exit_code,
        )
    gave_up = attempt.first(GaveUp)
    if isinstance(gave_up, GaveUp):
        # Ranks that left in order, and are not started again: too many machines were taken away.
        orderly = attempt.first(RunFinished) is not None
        kind = "preemption" if orderly else "failure"
        return replace(base, kind=kind, time=gave_up.time, error=gave_up.reason)
    return None


def _rank(number: int) -> int | None:
    """Launchers write -1 where no rank is to blame."""
    return number if number >= 0 else None
