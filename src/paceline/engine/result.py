"""What one optimizer step did."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from paceline.engine.nonfinite import Problem


@dataclass
class StepResult:
    """The outcome of ``Engine.step``; equal on every rank, but for ``seconds``.

    ``loss`` (the mean over the global batch), ``grad_norm`` (before clipping) and ``samples`` (of
    the global batch) are read from the device when asked for. ``problem`` says why the parameters
    were left alone, where they were.
    """

    step: int
    lr: float
    seconds: float
    problem: Problem | None = None
    _sums: Tensor = field(repr=False, kw_only=True)  # of the loss, its items and the samples
    _norm: Tensor | None = field(repr=False, kw_only=True)

    @property
    def loss(self) -> float:
        """The mean loss over the global batch."""
        return float(self._sums[0] / self._sums[1])

    @property
    def samples(self) -> int:
        """How many samples the global batch held."""
        return int(self._sums[2])

    @property
    def grad_norm(self) -> float | None:
        """The norm of the whole gradient before clipping; ``None`` when nothing needed it."""
        return None if self._norm is None else float(self._norm)

    @property
    def skipped(self) -> bool:
        """Whether the parameters were left alone."""
        return self.problem is not None
