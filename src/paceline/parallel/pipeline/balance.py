"""Where to cut a chain of units so that the heaviest stage is as light as can be."""

from __future__ import annotations

import math
from collections.abc import Sequence


def lightest_cuts(costs: Sequence[float], stages: int, traffic: Sequence[int]) -> list[int]:
    """The first unit of each stage but stage 0.

    Among the partitions into contiguous stages whose heaviest is lightest, the one that sends the
    fewest bytes; ``traffic[i]`` is what a cut before unit ``i`` sends. Every stage gets a unit.
    """
    bound = _lightest(costs, stages)
    allowed = bound * (1 + 1e-12) + 1e-12
    units = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[s][i]: the fewest bytes of a way to put the units from i on into s stages.
    best = [[math.inf] * (units + 1) for _ in range(stages + 1)]
    choice = [[units] * (units + 1) for _ in range(stages + 1)]
    best[0][units] = 0.0
    for number in range(1, stages + 1):
        for start in range(units - number, -1, -1):
            for end in range(start + 1, units - number + 2):
                if sums[end] - sums[start] > allowed:
                    break
                sent = best[number - 1][end] + (traffic[end] if end < units else 0)
                if sent < best[number][start]:
                    best[number][start], choice[number][start] = sent, end
    cuts, start = [], 0
    for number in range(stages, 1, -1):
        start = choice[number][start]
        cuts.append(start)
    return cuts


def _lightest(costs: Sequence[float], stages: int) -> float:
    """The cost of the heaviest stage of the best partition."""
    units = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # heaviest[i]: of the best way to put the units from i on into the number of stages at hand.
    heaviest = [sums[units] - sums[i] for i in range(units)] + [math.inf]
    heaviest[units] = math.inf
    for number in range(2, stages + 1):
        heaviest = [
            min(
                (
                    max(sums[end] - sums[start], heaviest[end])
                    for end in range(start + 1, units - number + 2)
                ),
                default=math.inf,
            )
            for start in range(units + 1)
        ]
    return heaviest[0]
