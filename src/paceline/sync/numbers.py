"""The numbers of a step, on their way to those who ask, and what was wrong with them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.errors import NonFiniteError


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


class Numbers:
    """The numbers of a step, on their way from the device.

    Reading waits for the step they belong to, not for whatever has been queued behind it.
    """

    def __init__(self, sums: Tensor, norm: Tensor | None, logged: Tensor | None = None) -> None:
        parts = [sums]
        if norm is not None:  # on the CPU, where offloaded parameters have their gradients
            parts.append(norm.to(sums).reshape(1))
        self._width = len(sums) + (norm is not None)
        values = torch.cat([*parts, *([] if logged is None else [logged])])
        self._problem: Problem | None = None
        self._host = values.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if values.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> list[float]:
        """Loss sum, item count, samples and, where it was computed, the gradient's norm."""
        return self._all()[: self._width]

    def logged(self) -> list[float]:
        """What the step's message held beside: see ``paceline.engine.logged``."""
        return self._all()[self._width :]

    def _all(self) -> list[float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()

    @property
    def loss(self) -> float:
        """The mean loss; NaN where there was nothing to average."""
        total, count, *_ = self.read()
        return total / count if count else math.nan

    @property
    def finite(self) -> bool:
        """Whether the loss and, where it was computed, the norm are finite."""
        norm = self.norm
        return math.isfinite(self.loss) and (norm is None or math.isfinite(norm))

    @property
    def norm(self) -> float | None:
        """The norm of the gradient, where it was computed."""
        _, _, _, *norm = self.read()
        return norm[0] if norm else None

    def note(self, problem: Problem | None) -> None:
        """What all ranks found to be wrong with them."""
        self._problem = problem

    @property
    def problem(self) -> Problem | None:
        """What kept the parameters from being updated, if anything did; all ranks know the same."""
        return self._problem
