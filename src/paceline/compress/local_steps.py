"""The model that replicas share while each of them trains alone, and how a meeting moves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.options import LocalSteps


class Outer:
    """The shared model, and the momentum of its steps; equal to the bit on all replicas."""

    def __init__(self, options: LocalSteps) -> None:
        self._options = options
        self.shared: dict[str, Tensor] = {}
        """Parameters as of the last meeting, by name."""
        self.momentum: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, parameters: Mapping[str, Tensor]) -> None:
        """The shared model is that of ``parameters`` from now on."""
        self.shared = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def distances(self, names: Sequence[str], parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """How far a replica has come since the last meeting, as a gradient points: uphill."""
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
