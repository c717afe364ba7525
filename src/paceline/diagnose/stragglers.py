"""Which rank the others wait for, from where each rank's time went; no torch, no processes.

Ranks of one world end their steps together: one that needs longer makes the others wait. Its own
work, all of its time but ``waiting``, is therefore longer than theirs, and by as much the step
would be shorter if it were like them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from paceline.diagnose.pulse import PHASES
from paceline.events import Straggler

WORTH_TELLING = 0.1
"""The share of a step that a straggler must cost; and it must cost a millisecond."""
_LEAST_SECONDS = 0.001
_OF_THE_MODEL = ("forward", "backward", "optimizer")


def find_straggler(
    phases: Mapping[str, Sequence[float]],
    hosts: Sequence[str],
    *,
    alike: Sequence[int] | None = None,
    step: int = 0,
) -> Straggler | None:
    """The rank that costs the step most, if that is worth telling.

    ``phases`` maps each phase to seconds by rank, as ``paceline.events.StepSplit`` has them;
    ``hosts`` names the machine of each rank. Ranks with the same number in ``alike`` have the same
    part of the model, all of them where it is left out: the time a stage of a pipeline takes is
    compared with that of the same stage elsewhere.
    """
    ranks = range(len(hosts))
    if len(ranks) < 2:
        return None
    alike = alike or [0] * len(hosts)
    excess = [
        {
            phase: _excess(phases[phase], rank, alike if phase in _OF_THE_MODEL else None)
            for phase in PHASES
            if phase != "waiting" and phase in phases
        }
        for rank in ranks
    ]
    costs = [sum(by_phase.values()) for by_phase in excess]
    rank = max(ranks, key=lambda r: costs[r])
    whole = max(sum(seconds[r] for seconds in phases.values()) for r in ranks)
    if costs[rank] < max(WORTH_TELLING * whole, _LEAST_SECONDS):
        return None
    work = sum(seconds[rank] for phase, seconds in phases.items() if phase != "waiting")
    usual = work - costs[rank]
    return Straggler(
        step=step,
        rank=rank,
        host=hosts[rank],
        phase=max(excess[rank], key=lambda phase: excess[rank][phase]),
        factor=work / usual if usual > 0 else float("inf"),
        costs=costs[rank],
        share=costs[rank] / whole,
    )


def _excess(seconds: Sequence[float], rank: int, alike: Sequence[int] | None) -> float:
    """How much longer ``rank`` takes than the median of the others it can be compared with."""
    others = [
        value
        for other, value in enumerate(seconds)
        if other != rank and (alike is None or alike[other] == alike[rank])
    ]
    return seconds[rank] - statistics.median(others) if others else 0.0


class StragglerFilter:
    """Decides which stragglers are reported, from one split to the next.

    A rank must be found slow twice in a row: one disturbance is no straggler. It is reported again
    when it is another rank, or slow elsewhere, or after a while without.
    """

    def __init__(self) -> None:
        self._before: Straggler | None = None
        self._told: tuple[int, str] | None = None
        self._quiet = 0

    def add(self, found: Straggler | None) -> Straggler | None:
        """Take in what ``find_straggler`` found in the next split; returns what to report."""
        before, self._before = self._before, found
        self._quiet = self._quiet + 1 if found is None else 0
        if self._quiet == 2:
            self._told = None
        if found is None or before is None or before.rank != found.rank:
            return None
        place = found.rank, found.phase
        if place == self._told or (self._told is not None and before.phase != found.phase):
            return None
        self._told = place
        return found
