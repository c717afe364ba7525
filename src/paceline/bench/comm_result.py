"""What ``bench comm`` finds, as plain data that goes to JSON and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

from paceline.bench.collectives import COLLECTIVES, algorithm_bandwidth, bus_bandwidth
from paceline.bench.latency_fit import LatencyFit, fit
from paceline.network.links import Link


@dataclass(frozen=True)
class Cell:
    """One collective at one size in one kind of group; of several such groups, the slowest.

    Times are seconds a call, of the slowest rank; ``median``, ``p10`` and ``p90`` of ``samples``
    measurements, each over ``calls`` calls in a row. ``by_group`` has the median of each group.
    """

    group: str
    collective: str
    size: int
    ranks: int
    median: float
    p10: float
    p90: float
    samples: int
    calls: int
    by_group: dict[str, float]
    algorithm_bandwidth: float
    bus_bandwidth: float


@dataclass(frozen=True)
class Pair:
    """The link between two machines: seconds one way, and bytes a second in each direction."""

    first: str
    second: str
    latency: float
    forward: float
    backward: float

    @property
    def bandwidth(self) -> float:
        """That of its slower direction."""
        return min(self.forward, self.backward)


@dataclass(frozen=True)
class Inside:
    """The links between the ranks of one machine: medians, and its slowest pair of ranks."""

    machine: str
    pairs: int
    latency: float
    bandwidth: float
    slowest: tuple[int, int]
    slowest_bandwidth: float


@dataclass(frozen=True)
class Setting:
    """Where it was measured: ``machines`` are host names by node, ``ranks`` how many each has."""

    machines: list[str]
    ranks: list[int]
    device: str
    backend: str
    dtype: str
    torch: str
    seconds: float


@dataclass(frozen=True)
class LeftOut:
    """What was not measured: a call would take ``expected`` seconds, or the backend ``refused``."""

    group: str
    collective: str
    size: int
    expected: float | None = None
    refused: str = ""


@dataclass
class CommResult:
    """All of it, as every rank gets it."""

    setting: Setting
    groups: dict[str, list[list[int]]]
    cells: list[Cell] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    inside: list[Inside] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def of(self, group: str, collective: str) -> list[Cell]:
        """The cells of one collective, in the order of their sizes."""
        found = [c for c in self.cells if (c.group, c.collective) == (group, collective)]
        return sorted(found, key=lambda cell: cell.size)

    def line(self, group: str, collective: str) -> LatencyFit | None:
        """Latency and bandwidth of one collective, fitted to all its sizes."""
        return fit([(cell.size, cell.median) for cell in self.of(group, collective)])

    def links(self) -> dict[str, Link]:
        """``within`` machines and ``across`` them, for ``reduction.links``; the slowest counts."""
        found = {}
        if self.inside:
            found["within"] = Link(
                max(one.latency for one in self.inside),
                min(one.bandwidth for one in self.inside),
            )
        if self.pairs:
            found["across"] = Link(
                max(pair.latency for pair in self.pairs),
                min(pair.bandwidth for pair in self.pairs),
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the fitted lines among them."""
        fits = []
        for group in self.groups:
            for name in COLLECTIVES:
                line = self.line(group, name)
                if line is not None:
                    fits.append({"group": group, "collective": name, **dataclasses.asdict(line)})
        links = {name: str(link) for name, link in self.links().items()}
        return {**dataclasses.asdict(self), "fits": fits, "links": links}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> CommResult:
        """A result from ``to_dict``."""
        return CommResult(
            setting=Setting(**data["setting"]),
            groups=data["groups"],
            cells=[Cell(**cell) for cell in data["cells"]],
            pairs=[Pair(**pair) for pair in data["pairs"]],
            inside=[
                Inside(**{**inside, "slowest": tuple(inside["slowest"])})
                for inside in data["inside"]
            ],
            left_out=[LeftOut(**one) for one in data["left_out"]],
        )


def make_cell(
    group: str,
    collective: str,
    size: int,
    calls: int,
    by_group: dict[str, list[list[float]]],
) -> Cell:
    """A cell from the samples of every rank, in seconds a call, by group.

    A call is over when its slowest rank is done, so the slowest one of each sample counts.
    """
    slowest = {
        name: [max(at_once) for at_once in zip(*ranks, strict=True)]
        for name, ranks in by_group.items()
    }
    medians = {name: spread(samples)[1] for name, samples in slowest.items()}
    worst = max(medians, key=lambda name: medians[name])
    p10, median, p90 = spread(slowest[worst])
    ranks = len(by_group[worst])
    return Cell(
        group=group,
        collective=collective,
        size=size,
        ranks=ranks,
        median=median,
        p10=p10,
        p90=p90,
        samples=len(slowest[worst]),
        calls=calls,
        by_group=medians,
        algorithm_bandwidth=algorithm_bandwidth(size, median),
        bus_bandwidth=bus_bandwidth(collective, ranks, size, median),
    )


def spread(samples: Sequence[float]) -> tuple[float, float, float]:
    """The 10th, 50th and 90th percentile."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    cuts = quantiles(samples, n=10, method="inclusive")
    return cuts[0], cuts[4], cuts[8]


def slow_links(pairs: Sequence[Pair]) -> list[str]:
    """Sentences that name the links with less than half the speed of the fastest one.

    A machine all of whose links are slow is named itself, unless all machines are.
    """
    if len(pairs) < 2:
        return []
    best = max(pairs, key=lambda pair: pair.bandwidth)
    slow = [pair for pair in pairs if 2 * pair.bandwidth < best.bandwidth]
    machines = list(dict.fromkeys(name for pair in pairs for name in (pair.first, pair.second)))
    guilty = [
        name
        for name in machines
        if all(pair in slow for pair in pairs if name in (pair.first, pair.second))
    ]
    told = [f"all links of {name} are slow" for name in guilty]
    told += [
        f"the link {pair.first} ↔ {pair.second} is slow"
        for pair in slow
        if pair.first not in guilty and pair.second not in guilty
    ]
    return told
