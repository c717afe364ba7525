"""What one optimizer step did."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.engine.nonfinite import Problem


class Numbers:
    """The numbers of a step, on their way from the device.

    Reading waits for the step they belong to, not for whatever has been queued behind it.
    """

    def __init__(self, sums: Tensor, norm: Tensor | None) -> None:
        values = sums
        if norm is not None:  # on the CPU, where offloaded parameters have their gradients
            values = torch.cat([sums, norm.to(sums).reshape(1)])
        self._host = values.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if values.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> list[float]:
        """Loss sum, item count, samples and, where it was computed, the gradient's norm."""
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

    @property
    def problem(self) -> Problem | None:
        """What was found to be wrong with them later, by all ranks alike."""
        return None


@dataclass
class StepResult:
    """The outcome of ``Engine.step``; equal on every rank, but for ``seconds``.

    ``loss`` (the mean over the global batch), ``grad_norm`` (before clipping) and ``samples`` (of
    the global batch) are read from the device when asked for. In a round of local steps asking
    waits until all replicas are through with the step; their ``grad_norm`` is the mean of theirs.
    """

    step: int
    lr: float
    seconds: float
    _problem: Problem | None = field(default=None, repr=False, kw_only=True)
    _numbers: Numbers = field(repr=False, kw_only=True)

    @property
    def problem(self) -> Problem | None:
        """Why the parameters were left alone (in a round: those of any replica), if they were."""
        return self._problem if self._problem is not None else self._numbers.problem

    @property
    def loss(self) -> float:
        """The mean loss over the global batch."""
        return self._numbers.loss

    @property
    def samples(self) -> int:
        """How many samples the global batch held."""
        return int(self._numbers.read()[2])

    @property
    def grad_norm(self) -> float | None:
        """The norm of the whole gradient before clipping; ``None`` when nothing needed it."""
        return self._numbers.norm

    @property
    def skipped(self) -> bool:
        """Whether the parameters were left alone."""
        return self.problem is not None
