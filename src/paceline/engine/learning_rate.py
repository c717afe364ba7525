"""The learning rate of each step, by a schedule of the user's or one of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.engine.checks import load_schedule
from paceline.errors import TrainingError


class LearningRate:
    """Drives ``schedule``: a function from the step to a factor, or one of torch's schedulers."""

    def __init__(
        self, optimizer: Optimizer, schedule: Callable[[int], float] | LRScheduler | None
    ) -> None:
        self._optimizer, self._schedule = optimizer, schedule
        # As torch's schedulers do: an optimizer that was scheduled before keeps its full rate.
        self._base = [g.setdefault("initial_lr", g["lr"]) for g in optimizer.param_groups]

    def set(self, steps_done: int) -> float:
        """Set the rates for the step after so many; the first group's."""
        schedule, groups = self._schedule, self._optimizer.param_groups
        if schedule is not None and not isinstance(schedule, LRScheduler):
            factor = schedule(steps_done)
            if not isinstance(factor, int | float):
                raise TrainingError(
                    f"the schedule gave {factor!r} at step {steps_done}: it must return a "
                    "number, the factor on the learning rate."
                )
            for group in groups[len(self._base) :]:  # added since
                self._base.append(group.setdefault("initial_lr", group["lr"]))
            for group, base in zip(groups, self._base, strict=True):
                group["lr"] = base * factor
        return float(groups[0]["lr"])

    def step_done(self) -> None:
        """Let one of torch's schedulers go on."""
        if isinstance(self._schedule, LRScheduler):
            self._schedule.step()

    def state_dict(self) -> dict[str, Any] | None:
        """That of one of torch's schedulers; a function of the step has none."""
        schedule = self._schedule
        return schedule.state_dict() if isinstance(schedule, LRScheduler) else None

    def load_state_dict(self, saved: Any) -> None:
        """Take over what ``state_dict`` gave."""
        if isinstance(self._schedule, LRScheduler) and saved is not None:
            load_schedule(self._schedule, saved)
