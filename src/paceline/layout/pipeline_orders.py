"""In which order each rank of a pipeline works: one generator for each schedule.

An order says what a rank does, one thing after the other; when, follows from the costs (see
``schedules.py``). The orders are those that ``torch.distributed.pipelining`` executes, which the
tests hold side by side.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import zip_longest
from typing import NamedTuple

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = "F", "B", "I", "W"


class Action(NamedTuple):
    """One piece of work: a pass of one microbatch through one stage; prints as torch's ``2F0``.

    ``kind`` is ``F`` (forward), ``B`` (the whole backward), ``I`` (the gradient of the stage's
    input alone) or ``W`` (that of its weights, later).
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Timed(NamedTuple):
    """An action and when it runs."""

    action: Action
    start: float
    end: float


Group = tuple[Action, ...]
"""Actions that a rank runs one after the other before it sends any of their results."""


def looped(pp: int, stages_per_rank: int) -> list[list[int]]:
    """Stages dealt out in turn: rank 0 holds 0, pp, 2·pp, …"""
    return [[rank + pp * turn for turn in range(stages_per_rank)] for rank in range(pp)]


def v_shaped(pp: int, stages_per_rank: int) -> list[list[int]]:
    """Stages dealt out to the last rank and back: rank 0 holds the first and the last."""
    return [
        [pp * turn + (rank if turn % 2 == 0 else pp - 1 - rank) for turn in range(stages_per_rank)]
        for rank in range(pp)
    ]


def gpipe(rank: int, pp: int, microbatches: int, stages: list[int]) -> list[Group]:
    """All forwards, then all backwards, oldest first."""
    lane = _Lane(stages)
    lane.repeat("F0", microbatches)
    lane.repeat("B0", microbatches)
    return lane.groups


def one_f_one_b(rank: int, pp: int, microbatches: int, stages: list[int]) -> list[Group]:
    """As many forwards as there are stages from here to the end, then backward and forward."""
    ahead = min(microbatches, pp - rank)
    lane = _Lane(stages)
    lane.repeat("F0", ahead)
    lane.repeat("B0 F0", microbatches - ahead)
    lane.repeat("B0", ahead)
    return lane.groups


def interleaved(rank: int, pp: int, microbatches: int, stages: list[int]) -> list[Group]:
    """1F1B over several stages a rank, a round of microbatches through each of them in turn."""
    forwards, backwards = _rounds(pp, microbatches, stages)
    ahead = _ahead(pp, microbatches, stages, hops=2 * (pp - 1 - rank))
    return _one_by_one(forwards[:ahead]) + [
        (Action(stage, kind, microbatch),)
        for pair in zip_longest(forwards[ahead:], backwards)
        for kind, work in zip((FORWARD, BACKWARD), pair, strict=True)
        if work is not None
        for stage, microbatch in [work]
    ]


def interleaved_zero_bubble(
    rank: int, pp: int, microbatches: int, stages: list[int]
) -> list[Group]:
    """As interleaved, with fewer forwards ahead; weight gradients lag ``rank`` backwards behind."""
    forwards, backwards = _rounds(pp, microbatches, stages)
    ahead = _ahead(pp, microbatches, stages, hops=pp - 1 - rank)
    groups = _one_by_one(forwards[:ahead])
    for index, (stage, microbatch) in enumerate(backwards):
        groups += _one_by_one(forwards[ahead + index : ahead + index + 1])
        groups.append((Action(stage, INPUT_GRAD, microbatch),))
        if index >= rank:
            groups.append(
                (Action(backwards[index - rank][0], WEIGHT_GRAD, backwards[index - rank][1]),)
            )
    left = backwards[max(len(backwards) - rank, 0) :]
    return groups + [(Action(stage, WEIGHT_GRAD, microbatch),) for stage, microbatch in left]


def zbv(rank: int, pp: int, microbatches: int, stages: list[int]) -> list[Group]:
    """Zero bubble over a V: each rank holds stage ``rank`` (chunk 0) and its mirror (chunk 1)."""
    # The pattern needs 2·pp - 1 microbatches to unfold; what is beyond the real ones is cut off.
    unfolded = max(2 * pp - 1, microbatches)
    lane = _Lane(stages)
    lane.repeat("F0", 2 * (pp - rank) - 1)
    lane.repeat("F1 F0", rank)
    lane.repeat("F1 I1 W1", pp - rank)
    while lane.done["F0"] < unfolded:
        lane.repeat("F0 I0 W0 F1 I1 W1")
    lane.repeat("I0 W0 F1 I1 W1", unfolded - lane.done["F1"])
    lane.repeat("I0 I1", rank)
    lane.repeat("I0 W0", pp - rank)
    lane.repeat("W1", unfolded - lane.done["W1"])
    lane.repeat("W0", unfolded - lane.done["W0"])
    return [group for group in lane.groups if group[0].microbatch < microbatches]


def dualpipev(rank: int, pp: int, microbatches: int, stages: list[int]) -> list[Group]:
    """Forward of one chunk paired with backward of the other, over the same V as ZBV.

    ``W`` takes the oldest weight gradient that is still owed, if any; a pair in brackets sends its
    results after both are done.
    """
    after = pp - 1 - rank
    lane = _Lane(stages)
    lane.repeat("F0", 2 * after)
    lane.repeat("F0 F1", rank + 1)
    lane.repeat("I1 W F1", after)
    paired = microbatches - 2 * pp + rank + 1
    if rank == pp - 1:  # the turn of the V: nothing to wait for, so nothing to pair
        lane.repeat("F0 B1 (F1,B0)")
        paired -= 1
    lane.repeat("(F0,B1) (F1,B0)", paired)
    lane.repeat("B1 (F1,B0)", after)
    # Halfway through what is left, weight gradients begin to be put off to the end.
    half, odd = divmod(rank + 1, 2)
    lane.repeat("B1 B0", half)
    lane.repeat("B1 I0", odd)
    lane.repeat("I1 I0", half)
    lane.repeat("W I0", after)
    lane.repeat("W", rank + 1)
    return lane.groups


Order = Callable[[int, int, int, list[int]], list[Group]]


class _Lane:
    """Writes a rank's actions from patterns: each ``F0`` is the next forward of its chunk 0."""

    def __init__(self, stages: list[int]) -> None:
        self.stages = stages
        self.groups: list[Group] = []
        self.done: Counter[str] = Counter()
        self._owed: deque[Action] = deque()

    def repeat(self, pattern: str, times: int = 1) -> None:
        for _ in range(times):
            for word in pattern.split():
                group = [self._next(piece) for piece in word.strip("()").split(",")]
                self.groups += [tuple(action for action in group if action)] if any(group) else []

    def _next(self, piece: str) -> Action | None:
        if piece == WEIGHT_GRAD:
            return self._owed.popleft() if self._owed else None
        kind, chunk = piece[0], piece[1]
        # A whole backward and an input gradient draw from one count: each microbatch has one.
        count = f"{INPUT_GRAD}{chunk}" if kind == BACKWARD else piece
        action = Action(self.stages[int(chunk)], kind, self.done[count])
        self.done[count] += 1
        if kind == INPUT_GRAD:
            self._owed.append(action._replace(kind=WEIGHT_GRAD))
        return action


def rounds(pp: int, microbatches: int) -> int:
    """In how many rounds the interleaved schedules take their microbatches, all of one size."""
    return max(1, microbatches // pp)


_Work = tuple[int, int]  # stage, microbatch


def _rounds(pp: int, microbatches: int, stages: list[int]) -> tuple[list[_Work], list[_Work]]:
    """The forwards and the backwards of a rank, each in its own order."""
    size = microbatches // rounds(pp, microbatches)
    starts = range(0, microbatches, size)
    forwards = [(s, m) for start in starts for s in stages for m in range(start, start + size)]
    backwards = [
        (s, m) for start in starts for s in stages[::-1] for m in range(start, start + size)
    ]
    return forwards, backwards


def _ahead(pp: int, microbatches: int, stages: list[int], hops: int) -> int:
    size = microbatches // rounds(pp, microbatches)
    return min((len(stages) - 1) * size + hops, microbatches * len(stages))


def _one_by_one(forwards: list[_Work]) -> list[Group]:
    return [(Action(stage, FORWARD, microbatch),) for stage, microbatch in forwards]
