"""What one optimizer step did."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.engine.logged import LoggedByName, StepLog
from paceline.sync.numbers import Numbers, Problem


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
    _numbers: Numbers = field(repr=False, kw_only=True)
    _log: StepLog | None = field(repr=False, kw_only=True, default=None)

    @property
    def problem(self) -> Problem | None:
        """Why the parameters were left alone (in a round: those of any replica), if they were."""
        return self._numbers.problem

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
    def logged(self) -> dict[str, float]:
        """What model and loss have logged, by name, over all ranks; see ``paceline.log``.

        On a GPU a name that is new in this step is there after the next one. In a round of local
        steps, values are reported when replicas meet.
        """
        return {name: value.value for name, value in self.log_values().items()}

    def log_values(self, *, late: bool = False) -> LoggedByName:
        """The same with their counts; ``late``: what was logged since the step before."""
        return {} if self._log is None else self._log.values(late=late)

    @property
    def skipped(self) -> bool:
        """Whether the parameters were left alone."""
        return self.problem is not None
