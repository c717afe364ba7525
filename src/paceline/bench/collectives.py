"""The collectives that can be measured, and what their sizes and bandwidths mean.

As NVIDIA's nccl-tests count: the *algorithm bandwidth* is the size divided by the time, and the
*bus bandwidth* is that times a factor which makes it comparable with the speed of a link, however
many ranks take part: the share of the size that the busiest rank must send or receive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One of them: ``size`` says which bytes count, ``factor`` is for ``n`` ranks."""

    name: str
    size: str
    factor: Callable[[int], float]

    @property
    def moves_data(self) -> bool:
        """Whether it has a size at all."""
        return bool(self.size)


def _twice_but_own(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _all_but_own(ranks: int) -> float:
    return (ranks - 1) / ranks


def _once(ranks: int) -> float:
    return 1.0


COLLECTIVES: dict[str, Collective] = {
    one.name: one
    for one in (
        Collective("all_reduce", "what each rank brings and gets", _twice_but_own),
        Collective("all_gather", "what each rank gets", _all_but_own),
        Collective("reduce_scatter", "what each rank brings", _all_but_own),
        Collective("all_to_all", "what each rank brings and gets", _all_but_own),
        Collective("broadcast", "what one rank brings", _once),
        Collective("reduce", "what each rank brings", _once),
        Collective("gather", "what one rank gets", _all_but_own),
        Collective("scatter", "what one rank brings", _all_but_own),
        Collective("send_recv", "what each rank sends to the next one", _once),
        Collective("barrier", "", _once),
    )
}


def algorithm_bandwidth(size: int, seconds: float) -> float:
    """Bytes a second, as one who calls the collective sees them."""
    return size / seconds if seconds > 0 else 0.0


def bus_bandwidth(name: str, ranks: int, size: int, seconds: float) -> float:
    """Bytes a second through the busiest rank's link."""
    return COLLECTIVES[name].factor(ranks) * algorithm_bandwidth(size, seconds)
