"""The world's numbers of a step in which no replica waits for another: they come later."""

from __future__ import annotations

import math
import time
from collections import deque

import torch
import torch.distributed as dist

from paceline.errors import NonFiniteError
from paceline.sync.numbers import Numbers, Problem
from paceline.world import World, collectives

LAG = 8
"""A replica is at most so many steps ahead of what it knows of the others."""
_FINE, _OVERFLOW, _LOSS, _GRADIENTS = 0, 1, 2, 3


class DeferredNumbers(Numbers):
    """The numbers of all replicas' steps together; reading waits until all are through with it.

    The loss is the mean over all of their items, the norm the mean of their norms.
    """

    def __init__(
        self,
        step: int,
        own: Numbers,
        problem: Problem | None,
        world: World,
        group: dist.ProcessGroup | None,
        *,
        looks: bool,
    ) -> None:
        self.step = step
        self._looks, self._group = looks, group
        self.own_problem = problem
        self._own, self._world = own, world
        self._values = torch.zeros(5 + world.size, dtype=torch.float64)
        self._work: dist.Work | None = None
        self._posted = False

    def post(self) -> None:
        """Tell the others, without waiting for them."""
        if self._posted:
            return
        self._posted = True
        total, count, samples, *norm = self._own.read()
        if self._looks and self.own_problem is None and not _is_finite(total, norm):
            what = "gradients" if math.isfinite(total) else "loss"
            self.own_problem = Problem(what, f"the {what} is not finite on rank {self._world.rank}")
        own = [total, count, samples, *(norm or [0.0]), float(count > 0)]
        self._values[:5] = torch.tensor(own, dtype=torch.float64)
        self._values[5 + self._world.rank] = _code(self.own_problem)
        if self._group is not None:
            self._work = dist.all_reduce(self._values, group=self._group, async_op=True)

    def wait(self) -> None:
        """Until all replicas have told theirs."""
        self.post()
        if self._work is not None:
            with self._world.pulse.during("waiting"):
                self._work.wait()
            self._work = None

    @property
    def is_there(self) -> bool:
        """Whether all replicas have told theirs."""
        return self._posted and (self._work is None or self._work.is_completed())

    def read(self) -> list[float]:
        """Loss sum, item count, samples and, where it was computed, the mean norm."""
        self.wait()
        total, count, samples, norm, replicas = self._values[:5].tolist()
        has_norm = len(self._own.read()) > 3
        return [total, count, samples, *([norm / max(replicas, 1)] if has_norm else [])]

    @property
    def problem(self) -> Problem | None:
        """What kept replicas from updating their parameters, if anything did; all know the same."""
        self.wait()
        if not self._looks:
            return None
        codes = [int(code) for code in self._values[5:].tolist()]
        bad = [rank for rank, code in enumerate(codes) if code >= _LOSS]
        if bad:
            what = "loss" if _LOSS in codes else "gradients"
            ranks = ", ".join(map(str, bad))
            detail = f"the {what} is not finite in the replica of rank {ranks}"
            return Problem(what, detail, bad)
        if float(self._values[1]) == 0:
            detail = "the loss counts no item of the global batch (is every target padding?)"
            return Problem("loss", detail, list(range(len(codes))))
        overflowed = [rank for rank, code in enumerate(codes) if code == _OVERFLOW]
        if overflowed:
            return Problem("gradients", "fp16 gradients overflowed", overflowed, overflow=True)
        return None


def _code(problem: Problem | None) -> int:
    if problem is None:
        return _FINE
    if problem.overflow:
        return _OVERFLOW
    return _LOSS if problem.what == "loss" else _GRADIENTS


def _is_finite(total: float, norm: list[float]) -> bool:
    return math.isfinite(total) and all(map(math.isfinite, norm))


class DeferredQueue:
    """The numbers on their way, oldest first; all replicas look at them at the same steps.

    Where NaN and Inf are to ``stop`` a run, all replicas raise at the same step, at most
    ``LAG`` after it happened.
    """

    def __init__(self, device: torch.device, *, stop: bool) -> None:
        self._device, self._stop = device, stop
        self._under_way: deque[DeferredNumbers] = deque()

    def add(self, late: DeferredNumbers) -> None:
        """Tell the others of a step that is done, and look at what they told ``LAG`` ago."""
        # Reading a GPU's numbers waits for it: it tells of a step while it works on the next.
        ready = [*self._under_way, late] if self._device.type == "cpu" else self._under_way
        for known in ready:
            known.post()
        self._under_way.append(late)
        while len(self._under_way) > LAG:
            self._look(self._under_way.popleft())

    def settle(self) -> None:
        """Wait for all of them, and look."""
        for late in self._under_way:
            late.post()
        while self._under_way:
            self._look(self._under_way.popleft())

    def finish(self, seconds: float) -> None:
        """The world is left: wait so long for the others, who may be some steps behind."""
        deadline = time.monotonic() + seconds
        for late in self._under_way:
            late.post()
        while self._under_way and time.monotonic() < deadline:
            if self._under_way[0].is_there:
                self._under_way.popleft()
            else:
                time.sleep(0.005)

    def _look(self, late: DeferredNumbers) -> None:
        late.wait()
        problem = late.problem
        if self._stop and problem is not None and not problem.overflow:
            raise self._error(late, problem)

    def _error(self, late: DeferredNumbers, problem: Problem) -> NonFiniteError:
        """Every replica raises the same, so they can tell each other what it was."""
        own = None if late.own_problem is None else late.own_problem.detail
        told = [detail for detail in collectives.all_gather_object(own) if detail]
        detail = "; ".join(told) or problem.detail
        found = Problem(problem.what, detail, problem.ranks)
        return found.error(late.step, alone=True)
