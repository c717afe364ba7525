"""Lion, which DeepSpeed has and torch has not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import TrainingError


class Lion(Optimizer):
    """Sign of an interpolated momentum, with decoupled weight decay (Chen et al., 2023)."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise TrainingError(f"Lion: betas={betas!r} must be two numbers from 0 to below 1.")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rate, (first, second) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average, gradient = state["exp_avg"], parameter.grad
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(torch.lerp(gradient, average, first).sign_(), alpha=-rate)
                average.lerp_(gradient, 1 - second)
        return loss
