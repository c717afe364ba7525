"""How large the buckets should be in which gradients leave while the backward goes on. Pure.

Small buckets leave early and pay the latency of the wire often; large ones leave late. Which size
is best follows from when each gradient is there and from how long the wire takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.network.links import Link, in_ms

MIB = 2**20
DEFAULT_MIB = 25.0
"""torch's own; with it, and no other, the parameters defined first have a bucket of 1 MiB."""
ONE_BUCKET = math.inf
CANDIDATES = (1.0, 2.0, 4.0, 8.0, 16.0, DEFAULT_MIB, 50.0, 100.0, ONE_BUCKET)
"""Sizes to choose from, in MiB; in the last everything leaves together, after the backward."""
_WORTH = 0.99  # a size that is not even this much faster is not worth laying buckets out anew


@dataclass(frozen=True)
class Gradient:
    """One parameter's: its bytes, and when it is there, in seconds from the backward's start."""

    size: int
    ready: float


@dataclass(frozen=True)
class Tuned:
    """The size chosen, in MiB, and how long backward and exchange take with each of them."""

    bucket_mib: float
    before_mib: float
    seconds: dict[float, float]
    backward_seconds: float

    def __str__(self) -> str:
        new, old = self.seconds[self.bucket_mib], self.seconds[self.before_mib]
        kept = self.bucket_mib == self.before_mib
        chosen = "buckets stay at" if kept else f"buckets from {_named(self.before_mib)} to"
        gain = "" if kept else f", {in_ms(old)} before ({100 * (1 - new / old):.0f}% less)"
        return (
            f"{chosen} {_named(self.bucket_mib)}: backward ({in_ms(self.backward_seconds)}) "
            f"and exchange take {in_ms(new)} together{gain}, as predicted"
        )


def evenly(sizes: Sequence[int], backward_seconds: float) -> list[Gradient]:
    """Gradients that come in this order, each after a time in proportion to its size."""
    total, done = sum(sizes), 0
    gradients = []
    for size in sizes:
        done += size
        gradients.append(Gradient(size, backward_seconds * done / total if total else 0.0))
    return gradients


def tune(
    gradients: Sequence[Gradient],
    link: Link,
    *,
    before_mib: float = DEFAULT_MIB,
    candidates: Sequence[float] = CANDIDATES,
) -> Tuned:
    """The best bucket size for ``gradients``, which are given in the order of the backward.

    ``link`` is the wire as a whole: how long a sum over all ranks takes. A size other than
    ``before_mib`` is chosen only if it is better; of equals, the largest.
    """
    tried = sorted({*candidates, before_mib}, reverse=True)
    seconds = {mib: exchange_seconds(gradients, link, mib) for mib in tried}
    best = min(tried, key=lambda mib: seconds[mib])
    if seconds[best] > _WORTH * seconds[before_mib]:
        best = before_mib
    backward = max((gradient.ready for gradient in gradients), default=0.0)
    return Tuned(best, before_mib, seconds, backward)


def exchange_seconds(gradients: Sequence[Gradient], link: Link, bucket_mib: float) -> float:
    """From the start of the backward until the last bucket is exchanged."""
    free = 0.0  # when the wire is
    for bucket in lay_out([gradient.size for gradient in gradients], bucket_mib):
        ready = max(gradients[i].ready for i in bucket)
        free = max(free, ready) + link.seconds(sum(gradients[i].size for i in bucket))
    return max(free, max((gradient.ready for gradient in gradients), default=0.0))


def lay_out(sizes: Sequence[int], bucket_mib: float) -> list[list[int]]:
    """Which of the gradients, in the order of the backward, share a bucket; in sending order.

    As DDP does: it fills buckets from the parameter defined first on, which the backward comes to
    last, and closes one as soon as it is full.
    """
    buckets: list[list[int]] = []
    filled = 0
    for index in reversed(range(len(sizes))):
        is_small = len(buckets) == 1 and bucket_mib == DEFAULT_MIB
        if not buckets or filled >= (1 if is_small else bucket_mib) * MIB:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
    return [bucket[::-1] for bucket in reversed(buckets)]


def _named(mib: float) -> str:
    return "one for everything" if math.isinf(mib) else f"{mib:g} MiB"
