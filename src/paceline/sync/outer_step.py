"""The model that replicas share while each trains alone, and the outer steps that move it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.options import LocalSteps


class OuterOptimizer:
    """The shared model, and the momentum of its steps; bitwise-identical on all replicas."""

    def __init__(self, options: LocalSteps) -> None:
        self._options = options
        self.shared: dict[str, Tensor] = {}
        """Parameters as of the last outer step, by name."""
        self.momentum: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, parameters: Mapping[str, Tensor]) -> None:
        """The shared model is that of ``parameters`` from now on."""
        self.shared = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def outer_gradients(
        self, names: Sequence[str], parameters: Mapping[str, Tensor]
    ) -> list[Tensor]:
        """How far a replica has come since the last outer step, as a gradient points: uphill."""
        return [self.shared[name] - parameters[name].detach() for name in names]

    @torch.no_grad()
    def step(self, names: Sequence[str], means: Sequence[Tensor]) -> None:
        """Move the shared model by the mean over the replicas of how far they came.

        With ``diloco`` as torch's SGD with Nesterov momentum moves by a gradient.
        """
        options = self._options
        for name, mean in zip(names, means, strict=True):
            if options.method == "average":
                self.shared[name].sub_(mean)
                continue
            update = mean
            if options.outer_momentum:
                momentum = self.momentum.setdefault(name, torch.zeros_like(mean))
                momentum.mul_(options.outer_momentum).add_(mean)
                update = mean.add(momentum, alpha=options.outer_momentum)
            self.shared[name].sub_(update, alpha=options.outer_lr)


@dataclass
class OuterStep:
    """One fragment's outer step, from when replicas begin to exchange how far they came."""

    fragment: int
    due: int
    """The step after which its result is taken over."""
    names: list[str]
    gradients: list[Tensor]
    """How far this replica came since the last one; the mean over all once it is exchanged."""
    buffers: dict[str, Tensor]
    """The same of the buffers that travel with this fragment."""
    weight: Tensor
    """The items that this replica's loss counted since then: 0 leaves it out."""
    snapshot: dict[str, Tensor] | None
    """Its parameters and buffers at the time, where steps go on meanwhile."""
    total: torch.futures.Future[Tensor] | Tensor | None = field(default=None)
    """The weights of all replicas added up, once they are exchanged."""

    def means(self) -> dict[str, Tensor]:
        """The means over the replicas, by parameter and buffer, once they are exchanged."""
        return dict(zip(self.names, self.gradients, strict=True)) | self.buffers

    def wait(self) -> Tensor:
        """Until they are exchanged; the weights of all replicas added up."""
        if isinstance(self.total, torch.futures.Future):
            self.total = self.total.wait()
        assert self.total is not None
        return self.total


def difference(one: Tensor, other: Tensor) -> Tensor:
    """``one - other``; nothing where they are equal, as infinities in a mask are."""
    return torch.where(one == other, 0.0, one - other).to(one.dtype)
