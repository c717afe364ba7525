"""One link at a time: latency and bandwidth between two ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from paceline.bench.comm_result import Inside, Pair
from paceline.world.group import Group

_END, _PING, _TAKE, _GIVE = range(4)
_SMALLEST, _LARGEST = 64 * 1024, 64 * 1024 * 1024
_LEAST_PINGS, _MOST_PINGS = 5, 200
_REPEATS = 2

Found = tuple[float, float, float]
"""Seconds one way, and bytes a second there and back."""


class PairProbe:
    """Measures the link to another rank; both of them must call ``measure`` at once.

    The lower rank leads: it sends orders (what, how many bytes), and has the clock.
    """

    def __init__(self, members: Group, device: torch.device, seconds: float) -> None:
        self._group = members.process_group
        self._me = members.ranks[members.rank]
        self._device = device
        self._seconds = seconds

    def measure(self, other: int) -> Found | None:
        """What the leader measured; ``None`` for the one that follows."""
        if other < self._me:
            self._follow(other)
            return None
        latency = self._latency(other)
        there, back = (self._bandwidth(other, what, latency) for what in (_TAKE, _GIVE))
        self._order(other, _END, 0)
        return latency, there, back

    def _latency(self, other: int) -> float:
        """Half of what it takes there and back, when nothing else is in the way."""
        nothing = self._memory(1)
        taken = [self._lead(other, _PING, nothing) for _ in range(_LEAST_PINGS)]
        wanted = int(self._seconds / 4 / max(median(taken), 1e-6))
        more = min(max(wanted, _LEAST_PINGS), _MOST_PINGS)
        return min(self._lead(other, _PING, nothing) for _ in range(more)) / 2

    def _bandwidth(self, other: int, what: int, latency: float) -> float:
        """Of a message that takes as long as there is time for, or is as large as makes sense."""
        size = _SMALLEST
        while True:
            data = self._memory(size)
            taken = min(self._lead(other, what, data) for _ in range(2))
            if taken >= self._seconds / 2 or size >= _LARGEST:
                break
            size = min(size * 4, _LARGEST)
        best = min(taken, *(self._lead(other, what, data) for _ in range(_REPEATS)))
        # The order (or the answer) and the data have one way each to go.
        return size / max(best - 2 * latency, best / 10)

    def _lead(self, other: int, what: int, data: torch.Tensor) -> float:
        answer = self._memory(1)
        begin = time.perf_counter()
        self._order(other, what, data.numel())
        if what == _TAKE:
            dist.send(data, other, self._group)
            dist.recv(answer, other, self._group)
        else:
            dist.recv(data, other, self._group)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - begin

    def _follow(self, leader: int) -> None:
        order = torch.zeros(2, dtype=torch.int64, device=self._device)
        data, answer = self._memory(1), self._memory(1)
        while True:
            dist.recv(order, leader, self._group)
            what, size = order.tolist()
            if what == _END:
                return
            if size != data.numel():
                data = self._memory(size)
            if what == _TAKE:
                dist.recv(data, leader, self._group)
                dist.send(answer, leader, self._group)
            else:
                dist.send(data, leader, self._group)

    def _order(self, other: int, what: int, size: int) -> None:
        order = torch.tensor([what, size], dtype=torch.int64, device=self._device)
        dist.send(order, other, self._group)

    def _memory(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self._device)


def between(first: str, second: str, found: Found) -> Pair:
    """The link between two machines, by name."""
    return Pair(first, second, *found)


def summarised(machine: str, links: Sequence[tuple[tuple[int, int], Found]]) -> Inside:
    """The links between the ranks of one machine."""
    speeds = {ranks: min(there, back) for ranks, (_, there, back) in links}
    slowest = min(speeds, key=lambda ranks: speeds[ranks])
    return Inside(
        machine=machine,
        pairs=len(links),
        latency=median(latency for _, (latency, _, _) in links),
        bandwidth=median(speeds.values()),
        slowest=slowest,
        slowest_bandwidth=speeds[slowest],
    )
