"""What faults cost a run: seconds by kind, steps done twice. Pure functions over its attempts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.diagnose.story.attempts import Attempt, standstills
from paceline.events import CheckpointSaved, StepDone, StepSplit, Straggler

STANDSTILL = "standstill"
"""A hang that went over by itself."""


@dataclass
class FaultCost:
    """What one kind of fault cost.

    ``seconds``: from the last step before a fault to the first new step after it; ``repeated``:
    steps that had to be done again.
    """

    faults: int = 0
    seconds: float = 0.0
    repeated: int = 0


@dataclass
class RunCosts:
    """Seconds lost, by where they went."""

    by_kind: dict[str, FaultCost] = field(default_factory=dict)
    not_running: float = 0.0
    """From an end that nobody undid to when somebody resumed the run."""
    saving: float = 0.0
    """Training stood still for this long to have its state copied."""
    stragglers: float = 0.0
    """The other ranks waited for this long for slow ones."""
    skipped_steps: int = 0
    skipped: float = 0.0
    """Steps whose update was left out because of NaN or Inf."""
    total: float = 0.0
    """The length of the run, less the time in which it was not running."""

    @property
    def repeated(self) -> int:
        """Steps done again, over all kinds."""
        return sum(loss.repeated for loss in self.by_kind.values())

    @property
    def lost(self) -> float:
        """Seconds lost to faults, over all kinds."""
        return sum(loss.seconds for loss in self.by_kind.values())

    def of(self, kind: str) -> FaultCost:
        """The entry for a kind of fault, made when it is not there yet."""
        return self.by_kind.setdefault(kind, FaultCost())


class _Ledger:
    """Adds up while going through the attempts in order."""

    def __init__(self) -> None:
        self.costs = RunCosts()
        self.reached = 0
        self.reached_at: float | None = None
        self.open: tuple[str, float] | None = None
        """A fault not made up for yet: its kind, and since when its time counts."""
        self.last_kind = ""

    def step(self, event: StepDone) -> None:
        """A step was done: a new one ends what the last fault costs."""
        if event.step <= self.reached:
            self.costs.of(self.last_kind or "failure").repeated += 1
            return
        self._settle(event.time)
        self.reached, self.reached_at = event.step, event.time

    def fault(self, kind: str, time: float, began: float) -> None:
        """An attempt ended before its time."""
        since = began if self.reached_at is None else self.reached_at
        if self.open is not None:  # struck again before anything new was done
            self._settle(time)
            since = time
        self.open, self.last_kind = (kind, since), kind
        self.costs.of(kind).faults += 1

    def pause(self, seconds: float) -> None:
        """Nobody was there to start it again: no fault is charged for that."""
        self.costs.not_running += seconds
        if self.open is not None:
            self.open = (self.open[0], self.open[1] + seconds)

    def _settle(self, time: float) -> None:
        if self.open is not None:
            kind, since = self.open
            self.costs.of(kind).seconds += max(0.0, time - since)
            self.open = None

    def close(self, time: float) -> RunCosts:
        """The end of the record."""
        self._settle(time)
        return self.costs


def costs_of(attempts: Sequence[Attempt]) -> RunCosts:
    """What went wrong in these attempts, in seconds and steps."""
    ledger = _Ledger()
    for index, attempt in enumerate(attempts):
        for event in attempt.events:
            if isinstance(event, StepDone):
                ledger.step(event)
        for hang, over in standstills(attempt):
            if over is not None and hang.seconds:
                loss = ledger.costs.of(STANDSTILL)
                loss.faults += 1
                loss.seconds += max(over.seconds, hang.seconds)
        if attempt.fault is not None:
            ledger.fault(attempt.fault.kind, attempt.fault.time, attempt.began)
        if index + 1 < len(attempts) and not attempt.goes_on_by_itself:
            ledger.pause(max(0.0, attempts[index + 1].began - attempt.ended))
    costs = ledger.close(attempts[-1].ended if attempts else 0.0)
    events = [event for attempt in attempts for event in attempt.events]
    if events:
        costs.total = max(0.0, events[-1].time - events[0].time - costs.not_running)
    costs.saving = sum(e.stalled for e in events if isinstance(e, CheckpointSaved))
    costs.stragglers = sum(straggler_seconds(attempts).values())
    skipped = [e for e in events if isinstance(e, StepDone) and e.skipped]
    costs.skipped_steps, costs.skipped = len(skipped), sum(e.seconds for e in skipped)
    return costs


def straggler_seconds(attempts: Sequence[Attempt]) -> dict[tuple[int, str, str], float]:
    """What each slow (rank, host, phase) cost the run, over the steps in which it was as slow."""
    found: dict[tuple[int, str, str], float] = {}
    for attempt in attempts:
        told: set[tuple[int, str]] = set()
        splits = [e for e in attempt.events if isinstance(e, StepSplit)]
        for event in attempt.events:
            if isinstance(event, Straggler) and (event.rank, event.phase) not in told:
                told.add((event.rank, event.phase))
                key = (event.rank, event.host, event.phase)
                steps = _steps_as_slow(event, splits)
                found[key] = found.get(key, 0.0) + event.costs * steps
    return found


def _steps_as_slow(event: Straggler, splits: Sequence[StepSplit]) -> int:
    """In how many steps of its attempt the rank was as slow as when it was reported.

    It is reported once, however long it lasts. What its phase takes without the excess is what it
    took then less what it cost; halfway between is the line.
    """
    then = next((s for s in splits if s.step == event.step), None)
    took = None if then is None else _seconds_of(event, then)
    if took is None:
        return 1
    line = took - event.costs / 2
    slow = ((split.steps, _seconds_of(event, split)) for split in splits)
    return sum(steps for steps, seconds in slow if seconds is not None and seconds >= line)


def _seconds_of(event: Straggler, split: StepSplit) -> float | None:
    """What the phase took on the rank; ``None`` where the split knows nothing of it."""
    by_rank = split.phases.get(event.phase, [])
    return by_rank[event.rank] if 0 <= event.rank < len(by_rank) else None
