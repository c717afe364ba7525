"""Where a rank is: its step, its phase, and when it last moved.

The training thread writes, at the cost of a clock reading; the watch thread and the split of a
step's time read. ``world.pulse`` is this rank's own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

PHASES = ("data", "forward", "backward", "waiting", "optimizer", "other")
"""What a step's time is split into; ``other`` is all the rest (callbacks, saving, reporting)."""

OUTSIDE = "outside"
"""The phase before the first step, and of a program that has no engine."""


class Pulse:
    """Where this rank's training thread is: what it last said of itself."""

    def __init__(self) -> None:
        self.step = 0
        self.phase = OUTSIDE
        self.moves = 0
        """Counts up whenever the thread moves on: who sees it stand still sees no movement."""
        self.since = time.perf_counter()
        """When it last moved."""
        self.spent: dict[str, float] = {}
        """Seconds by phase since ``take_spent``."""
        self.longest_step = 0.0
        self.listener: Callable[[str], None] | None = None
        """Called with each phase that begins, while time is measured: engine/step_timing.py."""
        self._step_began: float | None = None

    def enter(self, phase: str, *, at: float | None = None) -> str:
        """The thread goes on to ``phase``; returns the one it leaves.

        ``at`` is when it did, where that is known only afterwards (``time.perf_counter()``).
        """
        now = time.perf_counter() if at is None else at
        left = self.phase
        self.spent[left] = self.spent.get(left, 0.0) + now - self.since
        self.phase, self.since = phase, now
        self.moves += 1
        if self.listener is not None:
            self.listener(phase)
        return left

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """In ``phase`` for the length of the block, then back in the one before."""
        left = self.enter(phase)
        try:
            yield
        finally:
            self.enter(left)

    def beat(self) -> None:
        """Still in the same phase, and moving: a batch evaluated, a microbatch done."""
        self.enter(self.phase)

    def finish_step(self, step: int) -> None:
        """``step`` steps are done."""
        self.step = step
        self.beat()
        if self._step_began is not None:
            self.longest_step = max(self.longest_step, self.since - self._step_began)
        self._step_began = self.since

    def pause(self) -> None:
        """What follows (an evaluation, a checkpoint) is no part of the next step's time."""
        self._step_began = None

    def take_spent(self) -> dict[str, float]:
        """The seconds by phase since the last call."""
        self.enter(self.phase)
        spent, self.spent = self.spent, {}
        return spent
