"""NaN and Inf: what to do about them, and where in a step they came from."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.engine.loss import LossModule
from paceline.engine.precision import Precision
from paceline.sync.numbers import Numbers, Problem
from paceline.sync.protocol import StepSync
from paceline.sync.replica import Replica
from paceline.world import World, collectives


class NonFiniteCheck:
    """Looks at the numbers of each step, and does as ``policy`` says: stop, skip or ignore.

    On a GPU that is to ``stop`` they are read while the next step runs: reading them at once would
    let it run dry.
    """

    def __init__(
        self, policy: str, replica: Replica, loss: LossModule, precision: Precision
    ) -> None:
        self.policy = policy
        self._replica, self._loss, self._precision = replica, loss, precision
        # On a GPU: of this step, and of the one before, which nobody has looked at yet.
        self._latest: _Unread | None = None
        self._earlier: _Unread | None = None

    @property
    def _looks_later(self) -> bool:
        """Whether the verdict on a step is read a step later.

        Only where nothing depends on it in between: a run that stops anyway, without a scaler,
        whose own look at the gradients makes the host wait already.
        """
        return (
            self._replica.device.type != "cpu"
            and self.policy == "stop"
            and self._precision.scaler is None
        )

    def check(
        self,
        numbers: Numbers,
        local_sums: Tensor,
        parts: list[tuple[Any, int]],
        sync: StepSync,
    ) -> Problem | None:
        """What is not finite in this step, if anything; raises where the policy is to stop.

        Replicas that train alone learn from each other that they have to stop, some steps later.
        """
        self._earlier, self._latest = self._latest, None
        if self.policy == "ignore":
            return None
        if self._looks_later:
            if not sync.alone:
                self._latest = _Unread(self._replica.steps_done + 1, numbers, local_sums)
            return None
        if sync.alone:
            return self._problem_alone(numbers, parts)
        problem = self._problem(numbers, local_sums, parts)
        if problem is not None and not problem.overflow and self.policy == "stop":
            for parameter in self._replica.parameters:
                parameter.grad = None
            raise problem.error(self._replica.steps_done + 1)
        return problem

    def look_at_step_before(self) -> None:
        """Raise if the step before this one was not finite."""
        unread, self._earlier = self._earlier, None
        self._look(unread)

    def settle(self) -> None:
        """Wait for the last step, and raise if it was not finite."""
        unread, self._latest = self._latest, None
        self._look(unread)

    def _look(self, unread: _Unread | None) -> None:
        if unread is not None and not unread.numbers.finite:
            found = locate(None, [], self._precision, unread.local_sums, self._replica.world)
            raise found.error(unread.step, updated=True)

    def _problem(
        self, numbers: Numbers, local_sums: Tensor, parts: list[tuple[Any, int]]
    ) -> Problem | None:
        if numbers.finite:
            return None
        if math.isfinite(numbers.loss) and self._precision.scaler is not None:
            return Problem(what="gradients", overflow=True, detail="fp16 gradients overflowed")
        # Where a forward is a collective, ranks cannot look alone.
        alone = self._replica.spread.is_plain and not self._replica.has_sync_norm
        module = self._loss if alone else None
        return locate(module, parts, self._precision, local_sums, self._replica.world)

    def _problem_alone(self, numbers: Numbers, parts: list[tuple[Any, int]]) -> Problem | None:
        """What is not finite in this replica's step; one without an item is fine."""
        total, _, _, *norm = numbers.read()
        if math.isfinite(total) and all(map(math.isfinite, norm)):
            return None
        if math.isfinite(total) and self._precision.scaler is not None:
            return Problem("gradients", "fp16 gradients overflowed", overflow=True)
        rank = self._replica.world.rank
        return locate_alone(self._loss, parts, self._precision, total, rank)


class _Unread(NamedTuple):
    """The numbers of a step that nobody has looked at yet."""

    step: int
    numbers: Numbers
    local_sums: Tensor


def locate(
    module: LossModule | None,
    parts: list[tuple[Any, int]],
    precision: Precision,
    local_sums: Tensor,
    world: World,
) -> Problem:
    """Find the ranks, and the parameters, in which NaN or Inf arose. Called by every rank.

    Gradients have been summed over the ranks by the time the problem shows, so where the loss is
    finite everywhere each rank computes its own once more, if ``module`` is given for that.
    """
    loss = float(local_sums[0])
    losses = collectives.all_gather_object((loss, float(local_sums[1])))
    bad = [rank for rank, (value, _) in enumerate(losses) if not _finite(value)]
    if bad:
        values = ", ".join(f"{losses[rank][0]} on rank {rank}" for rank in bad)
        return Problem("loss", f"the loss is {values} (world of {world.size})", bad)
    if sum(count for _, count in losses) == 0:
        return Problem(
            "loss",
            "the loss counts no item of the global batch (is every target padding?), so its mean "
            "is 0/0",
            list(range(world.size)),
        )
    everyone = list(range(world.size))
    if module is None:
        return Problem("gradients", "the gradients are not finite, though the loss is", everyone)
    named = collectives.all_gather_object(_bad_gradients(module, parts, precision))
    bad = [rank for rank, names in enumerate(named) if names]
    if not bad:
        return Problem(
            "gradients",
            "the gradients are finite on each rank, but their sum over ranks, or its norm, is not",
            everyone,
        )
    where = "; ".join(f"rank {rank}: {_shortened(named[rank])}" for rank in bad)
    return Problem("gradients", f"the gradients are not finite, though the loss is ({where})", bad)


def locate_alone(
    module: LossModule,
    parts: list[tuple[Any, int]],
    precision: Precision,
    loss: float,
    rank: int,
) -> Problem:
    """Find where NaN or Inf arose in a replica that trains alone. Called by its rank only."""
    if not _finite(loss):
        return Problem("loss", f"the loss is {loss} on rank {rank}", [rank])
    names = _bad_gradients(module, parts, precision)
    where = f"rank {rank}" + (f": {_shortened(names)}" if names else "")
    return Problem(
        "gradients", f"the gradients are not finite, though the loss is ({where})", [rank]
    )


def _bad_gradients(
    module: LossModule, parts: list[tuple[Any, int]], precision: Precision
) -> list[str]:
    """Names of the parameters whose gradient on this rank's own samples is not finite."""
    named = [(n, p) for n, p in module.model.named_parameters() if p.requires_grad]
    bad: set[str] = set()
    for part, items in parts:
        with precision.forward():
            total = module(part, items).total
        gradients = torch.autograd.grad(total, [p for _, p in named], allow_unused=True)
        for (name, _), gradient in zip(named, gradients, strict=True):
            if gradient is not None and not bool(gradient.isfinite().all()):
                bad.add(name)
    return [name for name, _ in named if name in bad]


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _finite(value: float) -> bool:
    return value - value == 0.0
