"""Looks at the heartbeats of all ranks, and asks for reports and diagnoses when they stop moving.

Runs in the launcher of the first machine, or in a rank where nobody launches (see ``watch``). It
never waits: ``Coordinator.tick`` is called again and again, and takes things one step further.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.diagnose.hangs.diagnosis import HangDiagnosis, diagnose_hang, diagnose_mismatch
from paceline.diagnose.hangs.mismatch import CallComparison, Mismatch
from paceline.diagnose.hangs.rank_heartbeat import UNREACHABLE, Heartbeat, RankReport
from paceline.diagnose.hangs.rank_heartbeat_store import HeartbeatStore

# A slow machine may hold up a heartbeat for this long without anything being wrong.
_SILENCE = 2.0
_MOVING_SECONDS = 1.0
_PACE_FACTOR = 3.0
_ACT_FACTOR = 2.0
_ACT_FACTOR_BEFORE_FIRST_STEP = 10.0


@dataclass(frozen=True)
class HangEnded:
    """What stood still moves again."""

    step: int | None
    seconds: float


@dataclass(frozen=True)
class Standing:
    """A rank's latest heartbeat, and how long it has not moved by now."""

    beat: Heartbeat
    seconds: float
    silent: bool = False


def limit_of(beats: Mapping[int, Heartbeat]) -> float:
    """Seconds without movement that are a hang: as set, or three times the longest step so far."""
    after = max(beat.after for beat in beats.values())
    return max(after, _PACE_FACTOR * max(beat.longest_step for beat in beats.values()))


def is_suspicious(standings: Mapping[int, Standing], limit: float) -> bool:
    """Whether it is time to ask: a rank stands still that should not.

    One that waits in a collective, or whose steps are marked. A program that merely computes for
    long, with nobody waiting for it, is none of our business.
    """
    return any(
        s.seconds >= limit and not s.beat.left and (s.beat.waiting or s.beat.paced)
        for s in standings.values()
    )


def is_due(finding: HangDiagnosis, seconds: float, limit: float, after: float) -> bool:
    """Whether it has stood for so long that something must be done.

    Before the first step there is little to go by, and starting can take long: more patience then.
    """
    if finding.what == "compiling":  # that takes as long as it takes
        return False
    if not finding.step:
        return seconds >= max(_ACT_FACTOR_BEFORE_FIRST_STEP * after, _ACT_FACTOR * limit)
    return seconds >= _ACT_FACTOR * limit


class Coordinator:
    """Diagnoses one world; ``tell`` is called with each finding, and when it is over."""

    def __init__(
        self,
        store: HeartbeatStore,
        world_size: int,
        *,
        tell: Callable[[HangDiagnosis | HangEnded], None],
    ) -> None:
        self._store, self._ranks, self._tell = store, range(world_size), tell
        self._world: tuple[int, int] = (-1, -1)
        self._forget()

    def _forget(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}
        self._comparison = CallComparison()
        self._mismatch: Mismatch | None = None
        self._question: int | None = None
        self._collect_until = 0.0
        self._not_before = 0.0
        self._finding: HangDiagnosis | None = None
        self._found: dict[int, tuple[int, int]] = {}
        self._found_at = 0.0
        self._moving_since: float | None = None
        self._standings: dict[int, Standing] = {}
        self._limit = 0.0

    def tick(self) -> None:
        """Take things one step further."""
        now = time.monotonic()
        beats = self._beats_of_this_world()
        if not beats:
            return
        self._standings = {rank: self._standing(beat, now) for rank, beat in beats.items()}
        self._limit = limit_of(beats)
        self._compare()
        if self._finding is not None:
            self._look_for_movement(now)
        elif self._question is not None:
            self._collect(now)
        elif now >= self._not_before and is_suspicious(self._standings, self._limit):
            self._question = self._store.ask()
            after = max(beat.after for beat in beats.values())
            self._collect_until = now + min(2.0, max(1.2, after / 3))

    def due(self) -> HangDiagnosis | None:
        """The finding that something must be done about, if it has come to that."""
        finding = self._finding
        if finding is None:
            return None
        after = max(s.beat.after for s in self._standings.values())
        seconds = self._seconds(finding)
        return finding if is_due(finding, seconds, self._limit, after) else None

    def _beats_of_this_world(self) -> dict[int, Heartbeat]:
        """Without those left over from an earlier world in the same store."""
        beats = self._store.beats(self._ranks)
        world = max((beat.world for beat in beats.values()), default=self._world)
        if world != self._world:
            self._forget()
            self._world = world
        return {rank: beat for rank, beat in beats.items() if beat.world == world}

    def _standing(self, beat: Heartbeat, now: float) -> Standing:
        number, since = self._seen.get(beat.rank, (-1, now))
        if number != beat.number:
            number, since = self._seen[beat.rank] = beat.number, now
        silence = now - since
        silent = silence > _SILENCE
        return Standing(beat, beat.still + (silence if silent else 0.0), silent)

    def _compare(self) -> None:
        mismatch = self._comparison.add(self._store.digests(self._standings))
        self._mismatch = self._mismatch or mismatch
        # Not in the middle of a hang: if that comes of it, the diagnosis names it, with stacks.
        if self._mismatch is not None and self._question is None and self._finding is None:
            steps = [s.beat.step for s in self._standings.values() if s.beat.step is not None]
            self._tell(diagnose_mismatch(self._mismatch, max(steps, default=None)))
            self._mismatch = None

    def _collect(self, now: float) -> None:
        assert self._question is not None
        there = self._store.answered(self._question, self._standings)
        if len(there) < len(self._standings) and now < self._collect_until:
            return
        reports = self._store.reports(self._question, self._standings)
        self._question = None
        finding = diagnose_hang(self._complete(reports), self._limit)
        if finding is None:
            self._not_before = now + self._limit / 2
            return
        self._finding, self._found_at, self._moving_since = finding, now, None
        if finding.what == "mismatch":
            self._mismatch = None
        self._found = {r: self._standings[r].beat.progress for r in finding.involved}
        self._tell(finding)

    def _complete(self, reports: dict[int, RankReport]) -> dict[int, RankReport]:
        """With what the last heartbeats say about ranks nobody answered for."""
        complete = {}
        for rank in set(self._ranks) - set(self._standings):
            complete[rank] = RankReport(rank=rank, state=UNREACHABLE, seconds=self._limit)
        for rank, standing in self._standings.items():
            beat = standing.beat
            report = reports.get(rank) or beat.report(state=UNREACHABLE)
            seconds = max(report.seconds, standing.seconds)
            complete[rank] = dataclasses.replace(report, seconds=seconds)
        return complete

    def _seconds(self, finding: HangDiagnosis) -> float:
        """How long those involved have stood still by now."""
        there = [self._standings[r] for r in finding.involved if r in self._standings]
        told = [s.seconds for s in there if not s.beat.left and not s.silent]
        return min(told, default=max((s.seconds for s in there), default=finding.seconds))

    def _look_for_movement(self, now: float) -> None:
        """Whether those that stood go on. A rank that raised moves as well, on its way out."""
        assert self._finding is not None
        here = {r: s.beat for r, s in self._standings.items() if r in self._found}
        moved = [b for r, b in here.items() if b.progress != self._found[r] and not b.left]
        if not moved or any(beat.left for beat in here.values()):
            self._moving_since = None
        elif self._moving_since is None:
            self._moving_since = now
        elif now - self._moving_since >= _MOVING_SECONDS:
            stood = self._finding.seconds + self._moving_since - self._found_at
            self._finding, self._found = None, {}
            self._tell(HangEnded(max((b.step or 0 for b in moved), default=None) or None, stood))
