"""Pipeline schedules as data: who does what and when, the bubble, what is held; no torch needed.

>>> from paceline.layout.pipeline_schedules import build_schedule
>>> print(build_schedule("1f1b", pp=4, microbatches=8).table())
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import NamedTuple

import paceline.layout.pipeline_orders as orders
from paceline.errors import LayoutError
from paceline.formatting import one_of
from paceline.layout.layout import shown_number
from paceline.layout.pipeline_drawing import draw_svg, draw_text
from paceline.layout.pipeline_orders import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Action,
    Group,
    Timed,
)


class _Kind(NamedTuple):
    order: orders.Order
    v_shaped: bool = False
    stages_per_rank: int | None = None  # None: as many as one likes
    default_stages: int = 1


_KINDS = {
    "gpipe": _Kind(orders.gpipe, stages_per_rank=1),
    "1f1b": _Kind(orders.one_f_one_b, stages_per_rank=1),
    "interleaved-1f1b": _Kind(orders.interleaved, default_stages=2),
    "interleaved-zero-bubble": _Kind(orders.interleaved_zero_bubble, default_stages=2),
    "zbv": _Kind(orders.zbv, v_shaped=True, stages_per_rank=2, default_stages=2),
    "dualpipev": _Kind(orders.dualpipev, v_shaped=True, stages_per_rank=2, default_stages=2),
}
MOST_RANKS = 256
"""The longest pipeline whose table is made: its time goes with the square of it."""
MOST_CELLS = 8_192
"""The largest table that is made: stages times microbatches."""
_LONGEST = 1e12
SCHEDULES = tuple(_KINDS)
"""The names of the schedules there are."""


def default_stages_per_rank(name: str) -> int:
    """How many stages a rank holds when nobody says: one, or two where the schedule loops."""
    return _kind(name).default_stages


def minimum_microbatches(name: str, pp: int, stages_per_rank: int | None = None) -> int:
    """The fewest microbatches the schedule takes; below the stages, most of a rank's time idles."""
    stages = _stages_per_rank(name, pp, stages_per_rank)
    return pp * stages if name in ("1f1b", "dualpipev") else 1


def check_schedule(
    name: str, pp: int, microbatches: int, stages_per_rank: int | None = None
) -> None:
    """Raise ``LayoutError`` with the numbers and the rule unless the schedule can run."""
    stages = _stages_per_rank(name, pp, stages_per_rank)
    _check_count("microbatches", microbatches)
    least = minimum_microbatches(name, pp, stages)
    if microbatches < least:
        raise LayoutError(
            f"schedule {name!r}: microbatches={microbatches}, but it needs at least one for each "
            f"of its {least} stages (pp={pp} × {stages} a rank). Use {least} or more microbatches, "
            "or the schedule 'gpipe', which takes any number."
        )
    rounds = orders.rounds(pp, microbatches)
    if name.startswith("interleaved") and microbatches % rounds:
        below = microbatches - microbatches % rounds
        raise LayoutError(
            f"schedule {name!r}: microbatches={microbatches} cannot be cut into "
            f"microbatches // pp = {microbatches} // {pp} = {rounds} rounds of one size. Use a "
            f"multiple of pp={pp} (always right), or {below}."
        )


def check_size(name: str, pp: int, microbatches: int, stages_per_rank: int | None = None) -> None:
    """Raise ``LayoutError`` unless the whole table can be made and looked at."""
    stages = pp * _stages_per_rank(name, pp, stages_per_rank)
    if pp > MOST_RANKS:
        raise LayoutError(
            f"schedule {name!r}: {shown_number(pp)} ranks are too many to be laid out one by one; "
            f"{MOST_RANKS} are the most. The pattern repeats: look at fewer."
        )
    if stages * microbatches > MOST_CELLS:
        raise LayoutError(
            f"schedule {name!r}: {shown_number(stages)} stages × {shown_number(microbatches)} "
            f"microbatches are too many to be laid out one by one; {MOST_CELLS} are the most. The "
            "pattern repeats: look at fewer ranks or microbatches."
        )


def placement(name: str, pp: int, stages_per_rank: int | None = None) -> list[list[int]]:
    """Which stages each rank holds, by rank: dealt out in turn, or to the last rank and back."""
    stages = _stages_per_rank(name, pp, stages_per_rank)
    return (orders.v_shaped if _kind(name).v_shaped else orders.looped)(pp, stages)


@dataclass(frozen=True)
class Costs:
    """How long each kind of action takes, in any unit: one number, or one for each stage.

    ``p2p`` is how long a result is under way to another rank.
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 2.0
    input_grad: float | Sequence[float] = 1.0
    weight_grad: float | Sequence[float] = 1.0
    p2p: float = 0.0

    def of(self, action: Action) -> float:
        """How long ``action`` takes."""
        cost = getattr(self, _COST_OF[action.kind])
        return float(cost if isinstance(cost, int | float) else cost[action.stage])

    def check(self, stages: int) -> None:
        """Raise ``LayoutError`` unless there is a cost for each of ``stages``."""
        for name in (f.name for f in fields(self)):
            cost = getattr(self, name)
            values = [cost] if isinstance(cost, int | float) else list(cost)
            if name != "p2p" and len(values) not in ({1} if values == [cost] else {stages}):
                raise LayoutError(
                    f"costs: {name} has {len(values)} values, but the schedule has {stages} "
                    "stages. Give one number, or one for each stage."
                )
            if any(value < 0 for value in values):
                raise LayoutError(f"costs: {name}={cost} must not be negative.")
            if not all(value <= _LONGEST for value in values):
                raise LayoutError(f"costs: {name}={cost} must be a number up to {_LONGEST:g}.")


_COST_OF = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT_GRAD: "input_grad",
    WEIGHT_GRAD: "weight_grad",
}


@dataclass(frozen=True)
class PipelineSchedule:
    """What each rank does and when: made by ``build_schedule``."""

    name: str
    pp: int
    microbatches: int
    stages_per_rank: int
    costs: Costs
    ranks: tuple[tuple[Timed, ...], ...] = field(repr=False)
    """The actions of each rank, in order."""

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        return self.pp * self.stages_per_rank

    def order(self, rank: int) -> list[Action]:
        """What ``rank`` does, one after the other."""
        return [timed.action for timed in self.ranks[rank]]

    @cached_property
    def makespan(self) -> float:
        """When the last rank is done."""
        return max(timed.end for rank in self.ranks for timed in rank)

    @cached_property
    def bubbles(self) -> list[float]:
        """The share of the step that each rank idles."""
        busy = [sum(timed.end - timed.start for timed in rank) for rank in self.ranks]
        return [1 - time / self.makespan if self.makespan else 0.0 for time in busy]

    @property
    def bubble(self) -> float:
        """The share of the step that the ranks idle, over all of them."""
        return sum(self.bubbles) / self.pp

    @cached_property
    def most_live(self) -> list[int]:
        """The most forwards whose backward is still owed that each rank holds at once.

        Counted per stage: a microbatch that is in two of a rank's stages counts twice. What a
        weight gradient still needs is held until it is computed.
        """
        return [_most_live([timed.action for timed in rank]) for rank in self.ranks]

    def table(self, columns: int = 240) -> str:
        """The schedule as text: time runs to the right, one row a rank, dots where it idles.

        Costs that do not share a unit are rounded to at most ``columns`` columns, which it says.
        """
        return draw_text(self, columns)

    def svg(self) -> str:
        """The schedule as an SVG picture."""
        return draw_svg(self)


def build_schedule(
    name: str,
    pp: int,
    microbatches: int,
    stages_per_rank: int | None = None,
    costs: Costs | None = None,
) -> PipelineSchedule:
    """The schedule ``name`` over ``pp`` ranks, each action as early as its inputs and rank allow.

    The order of each rank is the one ``torch.distributed.pipelining`` executes.
    """
    check_size(name, pp, microbatches, stages_per_rank)
    check_schedule(name, pp, microbatches, stages_per_rank)
    stages = _stages_per_rank(name, pp, stages_per_rank)
    costs = costs or Costs()
    costs.check(pp * stages)
    held = placement(name, pp, stages)
    order = _kind(name).order
    plan = [order(rank, pp, microbatches, held[rank]) for rank in range(pp)]
    ranks = _simulate(plan, held, costs)
    return PipelineSchedule(
        name, pp, microbatches, stages, costs, tuple(tuple(rank) for rank in ranks)
    )


def _simulate(plan: list[list[Group]], held: list[list[int]], costs: Costs) -> list[list[Timed]]:
    """Run every rank's groups in order; a result reaches other ranks when its group is done."""
    home = {stage: rank for rank, stages in enumerate(held) for stage in stages}
    last = len(home) - 1
    ranks: list[list[Timed]] = [[] for _ in plan]
    here: dict[Action, float] = {}  # when a result is there for the rank that computed it
    sent: dict[Action, float] = {}  # when it is there for others
    waiting = [0] * len(plan)
    moved = True
    while moved:
        moved = False
        for rank, groups in enumerate(plan):
            while waiting[rank] < len(groups):
                timed = _run(
                    groups[waiting[rank]], rank, ranks[rank], here, sent, home, last, costs
                )
                if timed is None:
                    break
                ranks[rank] += timed
                sent |= {t.action: timed[-1].end + costs.p2p for t in timed}
                waiting[rank] += 1
                moved = True
    assert all(at == len(groups) for at, groups in zip(waiting, plan, strict=True)), "deadlock"
    return ranks


def _run(
    group: Group,
    rank: int,
    before: list[Timed],
    here: dict[Action, float],
    sent: dict[Action, float],
    home: dict[int, int],
    last: int,
    costs: Costs,
) -> list[Timed] | None:
    """The group with its times; ``None`` while something it needs has no time yet."""
    now = before[-1].end if before else 0.0
    timed: list[Timed] = []
    for action in group:
        for alternatives in _inputs(action, last):
            times = [
                (here if home[needed.stage] == rank else sent).get(needed)
                for needed in alternatives
            ]
            known = [time for time in times if time is not None]
            if not known:
                return None
            now = max(now, *known)
        timed.append(Timed(action, now, now + costs.of(action)))
        here[action] = now = timed[-1].end
    return timed


def _inputs(action: Action, last: int) -> list[list[Action]]:
    """What must be done before ``action``: for each thing, the actions that give it."""
    stage, kind, microbatch = action
    if kind == WEIGHT_GRAD:
        return [[Action(stage, INPUT_GRAD, microbatch)]]
    if kind == FORWARD:
        return [[Action(stage - 1, FORWARD, microbatch)]] if stage else []
    needed = [[Action(stage, FORWARD, microbatch)]]
    if stage < last:
        needed.append([Action(stage + 1, k, microbatch) for k in (BACKWARD, INPUT_GRAD)])
    return needed


def _most_live(order: list[Action]) -> int:
    changes = ((a.kind == FORWARD) - (a.kind in (BACKWARD, WEIGHT_GRAD)) for a in order)
    return max(itertools.accumulate(changes))


def _kind(name: str) -> _Kind:
    if name not in _KINDS:
        near = difflib.get_close_matches(name.lower(), SCHEDULES, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise LayoutError(f"schedule {name!r} must be {one_of(SCHEDULES)}.{hint}")
    return _KINDS[name]


def _stages_per_rank(name: str, pp: int, stages_per_rank: int | None) -> int:
    kind = _kind(name)
    _check_count("pp", pp)
    stages = kind.default_stages if stages_per_rank is None else stages_per_rank
    _check_count("stages_per_rank", stages)
    if kind.stages_per_rank not in (None, stages):
        several = [n for n, k in _KINDS.items() if k.stages_per_rank in (None, stages)]
        raise LayoutError(
            f"schedule {name!r} needs exactly {kind.stages_per_rank} "
            f"stage{'s' if kind.stages_per_rank != 1 else ''} a rank, but stages_per_rank={stages}."
            f" Leave it out, or use one of {', '.join(several)}."
        )
    return stages


def _check_count(what: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        shown = shown_number(value) if isinstance(value, int) else repr(value)
        raise LayoutError(f"schedule: {what}={shown} must be a whole number, 1 or more.")
