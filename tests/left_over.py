"""Processes that a command should not have left behind."""

from __future__ import annotations

import time

from paceline.testing.processes import pids, was_started_with

_SECONDS_TO_END = 30.0


def left_over(variable: str, value: str) -> list[int]:
    """Processes started with ``variable`` set to ``value`` that do not end by themselves."""
    deadline = time.monotonic() + _SECONDS_TO_END
    while found := [pid for pid in pids() if was_started_with(pid, variable, value)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return found
