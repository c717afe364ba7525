"""Who waits for whom: a graph over ranks, from their reports. Pure.

A rank waits in the first collective of a group that it has begun and that is not over; it waits for
the members that have not begun it. A rank in a point-to-point call waits for its peer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.diagnose.hangs.rank_heartbeat import ANSWERS, Call, GroupKey, RankReport
from paceline.diagnose.hangs.stacks import spot


@dataclass(frozen=True)
class OpenCollective:
    """A collective that is not over: who is in it, who has not come, and what it is, if known."""

    key: GroupKey
    number: int
    inside: tuple[int, ...]
    missing: tuple[int, ...]
    call: Call | None


@dataclass(frozen=True)
class Waits:
    """All waits of a world. ``edges`` maps a rank to those it waits for."""

    collectives: tuple[OpenCollective, ...]
    edges: dict[int, frozenset[int]]
    waiting: frozenset[int]

    def roots(self) -> list[int]:
        """The ranks that others wait for, directly or not, and that wait for nobody."""
        awaited = {rank for targets in self.edges.values() for rank in targets}
        return sorted(rank for rank in awaited if not self.edges.get(rank))

    def cycle(self) -> list[int]:
        """Some ranks that wait for each other in a ring; empty when there is none."""
        for start in sorted(self.edges):
            path = [start]
            while targets := self.edges.get(path[-1]):
                following = min(targets)
                if following in path:
                    return path[path.index(following) :]
                path.append(following)
        return []


def find_waits(reports: Mapping[int, RankReport]) -> Waits:
    """The waits that these reports show."""
    collectives = _open_collectives(reports)
    edges: dict[int, set[int]] = {}
    waiting: set[int] = set()
    for collective in collectives:
        waiting |= set(collective.inside)
        for rank in collective.inside:
            edges.setdefault(rank, set()).update(collective.missing)
    for rank, report in reports.items():
        if report.message is not None:
            waiting.add(rank)
            if report.message.peer is not None:
                edges.setdefault(rank, set()).add(report.message.peer)
    _break_false_cycles(reports, edges)
    return Waits(
        collectives=tuple(collectives),
        edges={rank: frozenset(targets - {rank}) for rank, targets in edges.items()},
        waiting=frozenset(waiting),
    )


def _break_false_cycles(reports: Mapping[int, RankReport], edges: dict[int, set[int]]) -> None:
    """A rank that began a collective in the background and is busy elsewhere waits for nobody.

    Only where there is no other explanation: a stack does not always show a wait.
    """
    awaited = {rank for targets in edges.values() for rank in targets}
    if any(not edges.get(rank) for rank in awaited):
        return
    for rank in sorted(awaited):
        report = reports.get(rank)
        if report is not None and report.message is None and not _shows_wait(report):
            edges[rank] = set()


def _shows_wait(report: RankReport) -> bool:
    if report.state != ANSWERS:
        return False
    if not report.stack:
        return True  # nothing is known: believe the recorder
    doing = spot(report.stack, phase=report.phase, kernel=report.kernel).doing
    return doing in ("collective", "message", "saving")


def _open_collectives(reports: Mapping[int, RankReport]) -> list[OpenCollective]:
    begun: dict[GroupKey, dict[int, int]] = {}
    open_numbers: dict[tuple[GroupKey, int], list[int]] = {}
    for rank, report in sorted(reports.items()):
        for place in report.groups:
            begun.setdefault(place.key, {})[rank] = place.begun
            if place.begun > place.done:
                number = _first_open(report, place.key, place.done + 1)
                open_numbers.setdefault((place.key, number), []).append(rank)
    found = []
    for (key, number), inside in sorted(open_numbers.items()):
        missing = [r for r in key[2] if begun[key].get(r, 0) < number]
        call = next(
            (c for r in inside for c in reports[r].calls if c.key == key and c.number == number),
            None,
        )
        found.append(OpenCollective(key, number, tuple(inside), tuple(missing), call))
    return found


def _first_open(report: RankReport, key: GroupKey, fallback: int) -> int:
    """The first call that is not over; calls may end out of order, so the record knows best."""
    numbers = [c.number for c in report.calls if c.key == key and not c.done]
    return min(numbers, default=fallback)
