"""How long sums over the ranks take, and how long a backward takes to come by its gradients."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.network.buckets import Gradient
from paceline.network.links import Choice, Link
from paceline.sync.wire import Wire
from paceline.world import World

_SMALL = 16 * 2**10
_LARGE = 8 * 2**20
_LONG_ENOUGH = 0.05  # seconds: above it the clock's and the scheduler's noise no longer counts
_TOO_LONG = 0.25
_TIMES_A_SMALL_ONE = 4
_ROUNDS = 3
_WORTH = 1.15  # two levels must be this much faster: what is a tie today is one tomorrow


def measure(flat: Wire, layered: Wire, world: World, most: int) -> Choice:
    """Time sums of at most ``most`` bytes both ways, and choose. A collective of all ranks.

    Every rank comes to the same choice. A tie goes to the one ring, so that two runs on the same
    machines choose alike.
    """
    size = _large_enough(flat, world, most)
    times = [[time_sum(wire, size, world) for wire in (flat, layered)] for _ in range(_ROUNDS)]
    one, two = (min(column) for column in zip(*times, strict=True))
    return Choice(one > _WORTH * two, one, two, size)


def measure_link(wire: Wire, world: World) -> Link:
    """What ``wire`` as a whole is like, from a small sum and a large one. A collective."""
    large = _large_enough(wire, world, _LARGE)
    short, long = (
        min(time_sum(wire, size, world) for _ in range(_ROUNDS)) for size in (_SMALL, large)
    )
    if long <= short:  # whatever disturbed the short ones: at least as much passes as in the long
        return Link(0.0, large / long)
    bandwidth = (large - _SMALL) / (long - short)
    return Link(max(short - _SMALL / bandwidth, 0.0), bandwidth)


def time_sum(wire: Wire, size: int, world: World) -> float:
    """Seconds that a sum of ``size`` bytes takes the slowest rank. A collective."""
    values = torch.zeros(max(1, size // 4), device=world.device)
    dist.all_reduce(torch.zeros(1), group=world.everyone.cpu_group)  # begin together
    began = time.perf_counter()
    wire.sum(values)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=world.everyone.cpu_group)
    return float(seconds)


def _large_enough(wire: Wire, world: World, most: int) -> int:
    """A size that takes long enough to be timed, and much longer than a message with nothing in it.

    Or as much as there is to sum. Opens the connections as well.
    """
    size = _SMALL
    limit = max(_SMALL, min(most, _LARGE))
    time_sum(wire, size, world)
    enough = _TIMES_A_SMALL_ONE * time_sum(wire, size, world)
    enough = min(max(enough, _LONG_ENOUGH), _TOO_LONG)
    while size < limit:
        size = min(4 * size, limit)
        if time_sum(wire, size, world) > enough:
            break
    return size


class BackwardTimer:
    """Notes when each gradient of some backward passes is there."""

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        # DDP fills its buckets in the order of definition, and assumes the backward goes against.
        self._parameters = [p for p in reversed(parameters) if p.requires_grad]
        self._now = _stream_now if device.type == "cuda" else _host_now
        self._passes: list[tuple[_Moment, list[_Moment]]] = []

    @property
    def passes(self) -> int:
        """How many have been timed."""
        return len(self._passes)

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Around one backward pass that exchanges gradients."""
        there: dict[int, _Moment] = {}

        def note(parameter: Tensor) -> None:
            there[id(parameter)] = self._now()

        began = self._now()
        handles = [p.register_post_accumulate_grad_hook(note) for p in self._parameters]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        # One that the loss does not depend on is there when the others are.
        last = next(reversed(there.values()), began)
        self._passes.append((began, [there.get(id(p), last) for p in self._parameters]))

    def gradients(self, world: World) -> list[Gradient]:
        """Those of the fastest pass, on the slowest rank. A collective."""
        passes = [[_between(began, end) for end in ends] for began, ends in self._passes]
        fastest = min(passes, key=lambda ready: max(ready, default=0.0))
        ready = torch.tensor(fastest, dtype=torch.float64)
        dist.all_reduce(ready, dist.ReduceOp.MAX, group=world.everyone.cpu_group)
        sizes = [p.numel() * p.element_size() for p in self._parameters]
        return [Gradient(*each) for each in zip(sizes, ready.tolist(), strict=True)]


_Moment = float | torch.cuda.Event


def _host_now() -> _Moment:
    return time.perf_counter()


def _stream_now() -> _Moment:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(began: _Moment, ended: _Moment) -> float:
    if isinstance(began, float) or isinstance(ended, float):
        assert isinstance(began, float)
        assert isinstance(ended, float)
        return ended - began
    ended.synchronize()
    return max(began.elapsed_time(ended), 0.0) / 1000
