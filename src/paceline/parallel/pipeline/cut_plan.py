"""A cut as data: where it is best made, which modules are on which stage, and what crosses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.parallel.pipeline.tracing import Name, describe


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


@dataclass(frozen=True)
class CutPlan:
    """Made by ``paceline.parallel.pipeline.cut``; the same for every rank; prints as a table.

    ``units`` are the modules in the order in which the model calls them (one that is called twice
    is there twice); stage ``s`` runs those from ``starts[s]`` up to ``starts[s + 1]``.
    """

    units: tuple[str, ...]
    starts: tuple[int, ...]
    crossing: tuple[tuple[Name, ...], ...]
    """For each boundary, the values that go over it."""
    crossing_bytes: tuple[int, ...]
    """Their size for the sample batch."""
    holders: Mapping[str, tuple[int, ...]]
    """The stages that hold each parameter, by name; more than one where it is shared."""
    used_in_glue: Mapping[str, tuple[int, ...]]
    """The stages whose code between modules uses a parameter directly."""
    unit_stages: Mapping[str, tuple[int, ...]]
    """The stages that hold each module."""
    late: Mapping[int, tuple[int, ...]] = field(repr=False)
    """Inputs of calls that can only be named there."""
    parameters: tuple[int, ...] = ()
    """How many parameters each stage holds."""
    costs: tuple[float, ...] = ()
    balance: str = "parameters"
    extra_units: tuple[str, ...] = ()
    """Modules that are units because a cut names them."""

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.starts)

    @property
    def cuts(self) -> tuple[str, ...]:
        """The names of the modules that start a stage, as ``Pipelining(cuts=...)`` takes them."""
        return tuple(self._call_name(start) for start in self.starts[1:])

    def span(self, stage: int) -> tuple[int, int]:
        """The first call of ``stage`` and the one after its last."""
        return self.starts[stage], (*self.starts, len(self.units))[stage + 1]

    def units_of(self, stage: int) -> tuple[str, ...]:
        """The modules of ``stage`` in the order of their first call."""
        first, last = self.span(stage)
        return tuple(dict.fromkeys(self.units[first:last]))

    def modules_of(self, stage: int) -> tuple[str, ...]:
        """The modules that ``stage`` holds, those included that the model never called."""
        unused = [n for n, held in self.unit_stages.items() if stage in held]
        return tuple(dict.fromkeys([*self.units_of(stage), *unused]))

    def __str__(self) -> str:
        total = sum(self.costs) or 1.0
        rows = [("stage", "modules", "parameters", f"share of {self.balance}", "receives")]
        for stage in range(self.stages):
            received = self.crossing[stage - 1] if stage else ()
            what = ", ".join(describe(name, self.units) for name in received)
            size = f" ({self.crossing_bytes[stage - 1]:,} bytes)" if stage else ""
            rows.append(
                (
                    str(stage),
                    _shortened(self.units_of(stage)),
                    f"{self.parameters[stage]:,}",
                    f"{self.costs[stage] / total:.1%}",
                    (what or "the batch") + size,
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows]
        shared = [name for name, held in self.holders.items() if len(held) > 1]
        if shared:
            lines.append(f"held by several stages, gradients summed: {', '.join(shared)}")
        return "\n".join(line.rstrip() for line in lines)

    def _call_name(self, call: int) -> str:
        name = self.units[call]
        before = self.units[:call].count(name)
        return f"{name}@{before + 1}" if before else name


def _shortened(names: tuple[str, ...]) -> str:
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} … {names[-1]} ({len(names)})"
