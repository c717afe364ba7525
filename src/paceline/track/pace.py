"""How fast a run goes and when it will be done, from its steps."""

from __future__ import annotations

from collections import deque

from paceline.events import StepDone


class Pace:
    """Speed over the last steps."""

    def __init__(self, window: int = 50) -> None:
        self._steps: deque[StepDone] = deque(maxlen=window)
        # Evaluations and saves are rare beside steps: they count over the whole run.
        self._first: StepDone | None = None
        self._between_steps = 0.0

    def add(self, step: StepDone) -> None:
        """Take in a step; one that goes back (after a restart) begins anew."""
        if self._steps and step.step <= self._steps[-1].step:
            self.start_anew()
        if self._steps:
            passed = step.time - self._steps[-1].time
            self._between_steps += max(0.0, passed - step.seconds)
        else:
            self._first = step
        self._steps.append(step)

    def start_anew(self) -> None:
        """The ranks were started (again), maybe others: what was before says nothing of them."""
        self._steps.clear()
        self._first, self._between_steps = None, 0.0

    @property
    def samples_per_second(self) -> float:
        """Training throughput; 0 before the first step."""
        seconds = sum(s.seconds for s in self._steps)
        return sum(s.samples for s in self._steps) / seconds if seconds else 0.0

    def seconds_left(self, total_steps: int | None) -> float | None:
        """Time until step ``total_steps``, evaluations and checkpoints on the way included."""
        if total_steps is None or not self._steps:
            return None
        assert self._first is not None
        last = self._steps[-1]
        per_step = sum(s.seconds for s in self._steps) / len(self._steps)
        if since_first := last.step - self._first.step:
            per_step += self._between_steps / since_first
        return max(0.0, per_step * (total_steps - last.step))
