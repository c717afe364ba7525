"""How fast a run goes and when it will be done, from its steps."""

from __future__ import annotations

from collections import deque

from paceline.events import StepDone


class Pace:
    """Speed over the last steps."""

    def __init__(self, window: int = 50) -> None:
        self._steps: deque[StepDone] = deque(maxlen=window)

    def add(self, step: StepDone) -> None:
        """Take in a step; one that goes back (after a restart) begins anew."""
        if self._steps and step.step <= self._steps[-1].step:
            self._steps.clear()
        self._steps.append(step)

    def start_anew(self) -> None:
        """The ranks were started (again), maybe others: what was before says nothing of them."""
        self._steps.clear()

    @property
    def samples_per_second(self) -> float:
        """Training throughput; 0 before the first step."""
        seconds = sum(s.seconds for s in self._steps)
        return sum(s.samples for s in self._steps) / seconds if seconds else 0.0

    def seconds_left(self, total_steps: int | None) -> float | None:
        """Time until step ``total_steps``, evaluations and checkpoints on the way included."""
        if total_steps is None or not self._steps:
            return None
        first, last = self._steps[0], self._steps[-1]
        steps = last.step - first.step
        per_step = (last.time - first.time) / steps if steps else last.seconds
        return max(0.0, per_step * (total_steps - last.step))
