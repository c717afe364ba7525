"""The gradient scaler of fp16 for layouts in which ranks hold different gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from paceline.options import LossScaling
from paceline.parallel.dtensor import local


class AgreedScaler:
    """What ``torch.amp.GradScaler`` does, with the same numbers, on which all ranks agree.

    torch's looks at the gradients of its own rank, and takes plain tensors or DTensors, not both:
    here an overflow on any rank makes every rank leave the step out and lower its scale. The ranks
    meet on ``device``, those without a gradient of their own too. ``alone``: they have no need to,
    since every rank has the whole gradient.
    """

    def __init__(
        self, device: torch.device, settings: LossScaling = LossScaling(), *, alone: bool = False
    ) -> None:
        self._device, self._alone = device, alone
        self._scale = settings.init_scale
        self._steps_since_growth = 0
        self._growth_factor = settings.growth_factor
        self._backoff_factor = settings.backoff_factor
        self._growth_interval = settings.growth_interval
        self._overflowed: dict[int, bool] = {}  # by optimizer, since the last update

    def get_scale(self) -> float:
        """What losses are multiplied by now."""
        return self._scale

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` times the scale."""
        return loss * self._scale

    def unscale_(self, optimizer: Optimizer) -> None:
        """Take the scale out of the gradients, and see on all ranks whether any overflowed."""
        gradients = [
            values_of(parameter.grad)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        bad = torch.zeros((), device=self._device)
        for gradient in gradients:
            gradient.mul_(1 / self._scale)
            bad += (~gradient.isfinite()).any().to(bad)
        if not self._alone:
            dist.all_reduce(bad)
        self._overflowed[id(optimizer)] = bool(bad)

    def overflowed(self, optimizer: Optimizer) -> bool:
        """Whether the gradients that were last unscaled for ``optimizer`` are not finite."""
        return self._overflowed.get(id(optimizer), False)

    def step(self, optimizer: Optimizer) -> None:
        """Update the parameters, unless the gradients overflowed."""
        if not self.overflowed(optimizer):
            optimizer.step()

    def update(self) -> None:
        """Lower the scale after an overflow; raise it after many steps without."""
        if any(self._overflowed.values()):
            self._scale *= self._backoff_factor
            self._steps_since_growth = 0
        else:
            self._steps_since_growth += 1
            if self._steps_since_growth == self._growth_interval:
                self._scale *= self._growth_factor
                self._steps_since_growth = 0
        self._overflowed.clear()

    def state_dict(self) -> dict[str, Any]:
        """In the form of torch's, so that a run can go on at any layout."""
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._steps_since_growth,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict``, or torch's, gave."""
        self._scale = float(state["scale"])
        self._growth_factor = state["growth_factor"]
        self._backoff_factor = state["backoff_factor"]
        self._growth_interval = state["growth_interval"]
        self._steps_since_growth = state["_growth_tracker"]


def values_of(gradient: Tensor) -> Tensor:
    """What can be measured and scaled of this rank's part of a gradient; shares its memory."""
    return gradient._values() if gradient.is_sparse else local(gradient)
