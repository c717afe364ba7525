"""What lies between ranks, and how long a sum over them takes by one way or the other. Pure.

A message takes a link's latency and its bytes over the bandwidth. That is coarse, and enough to
tell two ways apart of which one sends much more over the slow link than the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.errors import TrainingError
from paceline.network.topology import Topology

_RATES = {"bit/s": 1 / 8, "b/s": 1.0, "ib/s": 1.0}  # what follows the prefix, in bytes
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BINARY = {"k": 2.0**10, "m": 2.0**20, "g": 2.0**30, "t": 2.0**40}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?"
_TEXT = re.compile(
    rf"(?P<rate>{_NUMBER})\s*(?P<prefix>[kmgt]?)(?P<unit>bit/s|ib/s|b/s)"
    rf"(?:[\s,]+(?P<latency>{_NUMBER})\s*(?P<time>s|ms|us|µs))?",
    re.IGNORECASE,
)
PIECE_BYTES = 4 * 2**20
"""A sum in two levels goes in pieces of this size, so that its three phases overlap."""


@dataclass(frozen=True)
class Link:
    """A way between two ranks: ``latency`` in seconds, ``bandwidth`` in bytes a second."""

    latency: float
    bandwidth: float

    @classmethod
    def parse(cls, text: str) -> Link:
        """Read ``"100 Mbit/s 5 ms"``; without a time the latency is none."""
        found = _TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
        if found is None:
            raise TrainingError(
                f"reduction: {text!r} does not describe a link. Write its rate and how long a "
                "message takes at least, such as '100 Mbit/s 5 ms' or '10 GB/s 20 us'."
            )
        prefix, unit = found["prefix"].lower(), found["unit"].lower()
        factor = _BINARY.get(prefix, 1.0) if unit == "ib/s" else _PREFIXES[prefix]
        bandwidth = float(found["rate"]) * factor * _RATES[unit]
        latency = float(found["latency"] or 0) * _TIMES[(found["time"] or "s").lower()]
        if not bandwidth > 0:
            raise TrainingError(f"reduction: {text!r}: a link's rate must be above 0.")
        return cls(latency, bandwidth)

    def seconds(self, size: float) -> float:
        """How long a message of ``size`` bytes takes."""
        return self.latency + size / self.bandwidth

    def __str__(self) -> str:
        bits = 8 * self.bandwidth
        prefix, factor = next(
            ((name, factor) for name, factor in (("G", 1e9), ("M", 1e6)) if bits >= factor),
            ("k", 1e3),
        )
        return f"{bits / factor:.3g} {prefix}bit/s {1e3 * self.latency:.3g} ms"


@dataclass(frozen=True)
class Links:
    """``within`` lies between two ranks of a node, ``across`` between a node and the others.

    All ranks of a node share its link to the others.
    """

    within: Link
    across: Link


@dataclass(frozen=True)
class Choice:
    """Whether sums go in two levels, and how long a sum takes either way, in seconds."""

    hierarchical: bool
    flat_seconds: float
    hierarchical_seconds: float
    size: int
    """Of how many bytes."""

    def __str__(self) -> str:
        kind = "within nodes, then across" if self.hierarchical else "in one ring over all ranks"
        return (
            f"gradients are summed {kind}: {self.size / 2**20:.3g} MiB take "
            f"{in_ms(self.hierarchical_seconds)} in two levels, {in_ms(self.flat_seconds)} in one"
        )


def in_ms(seconds: float) -> str:
    """``"3.51 ms"`` or ``"1240 ms"``."""
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def choose(topology: Topology, links: Links, size: int) -> Choice:
    """The faster way to sum ``size`` bytes over all ranks, by arithmetic."""
    flat = flat_seconds(topology, links, size)
    if not topology.has_two_levels:
        return Choice(False, flat, flat, size)
    layered = hierarchical_seconds(topology, links, size)
    return Choice(layered < flat, flat, layered, size)


def flat_seconds(topology: Topology, links: Links, size: int) -> float:
    """One ring over all ranks: everything but a rank's own share passes each hop, twice."""
    count = topology.size
    if count == 1:
        return 0.0
    out = topology.ways_out()
    across, within = sum(out), count - sum(out)
    passed = 2 * (count - 1) / count * size
    # A node with several ways out sends as much over its one link for each of them.
    slowest = max(
        passed * max(out) / links.across.bandwidth,
        passed / links.within.bandwidth if within else 0.0,
    )
    # A share of the sum goes round nearly twice, over every hop in turn.
    hops = 2 * (count - 1) / count
    return hops * (across * links.across.latency + within * links.within.latency) + slowest


def hierarchical_seconds(topology: Topology, links: Links, size: int) -> float:
    """To the lanes of each node, a ring along each lane, and back; in pieces that overlap."""
    nodes, lanes = len(topology.nodes), topology.lanes
    largest = max(map(len, topology.nodes))
    # The first ranks of a node take a chunk from each of the others; those beyond the lanes give
    # everything away.
    moved = max((largest - 1) / lanes, 1.0 if largest > lanes else 0.0) * size
    within = moved / links.within.bandwidth
    across = 2 * (nodes - 1) / nodes * size / links.across.bandwidth
    phases = (within, across, within)
    pieces = max(1, -(-size // PIECE_BYTES))
    overlapped = max(phases) + (sum(phases) - max(phases)) / pieces
    return overlapped + 2 * links.within.latency + 2 * (nodes - 1) * links.across.latency
