"""How fast a run goes and when it will be done, from its steps; and how to write numbers down."""

from __future__ import annotations

import math
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


def number(value: float) -> str:
    """A loss or a metric, short but not misleadingly so: 2.3457, 1.2e-05, nan."""
    if not math.isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4f}" if math.isfinite(value) else str(value)
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """0.4 s, 41 s, 2:05, 1:02:03."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def clock(seconds: float) -> str:
    """A time to wait: 0:05, 12:40, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def rate(per_second: float) -> str:
    """A throughput: 0.25, 8.3, 1,234."""
    if per_second >= 100:
        return f"{per_second:,.0f}"
    return f"{per_second:.3g}"


def size(count: int) -> str:
    """A file size: 512 B, 3.2 MB."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def count(amount: int) -> str:
    """A number of parameters: 512, 12.3k, 3.2M, 1.3B."""
    amount_left = float(amount)
    for unit in ("", "k", "M"):
        if amount_left < 1000:
            return f"{amount_left:.0f}" if not unit else f"{amount_left:.1f}{unit}"
        amount_left /= 1000
    return f"{amount_left:.1f}B"


def plural(amount: int, noun: str) -> str:
    """1 rank, 2 ranks."""
    return f"{amount} {noun}" if amount == 1 else f"{amount} {noun}s"
