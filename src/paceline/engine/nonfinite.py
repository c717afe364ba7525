"""NaN and Inf: where in a step they came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.engine.loss import LossModule
from paceline.engine.precision import Precision
from paceline.errors import NonFiniteError
from paceline.world import World, collectives


@dataclass(frozen=True)
class Problem:
    """What kept a step from updating the parameters.

    ``overflow`` marks the ordinary case of fp16: the gradient scaler lowers its scale and goes on.
    """

    what: str  # "loss" or "gradients"
    detail: str
    ranks: list[int] = field(default_factory=list)
    overflow: bool = False

    def error(self, step: int, *, updated: bool = False, alone: bool = False) -> NonFiniteError:
        """The exception for a run that stops at ``step``; ``updated`` says it came too late.

        ``alone``: replicas train by themselves, and the others learned of it some steps later.
        """
        state = "The parameters were not updated."
        if updated:
            state = (
                "It showed after the update, so the parameters are spoilt: go on from a checkpoint."
            )
        elif alone:
            state = "Replicas that train alone hear of each other some steps later: all stop now."
        return NonFiniteError(
            f"step {step}: {self.detail}. {state} Look at the data of this step and at the "
            "learning rate, or pass nonfinite='skip' to leave such steps out.",
            step=step,
            what=self.what,
            ranks=self.ranks,
        )


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
