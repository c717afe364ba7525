"""Faults on purpose: a chosen rank dies, raises, hangs or dawdles at a chosen step.

    faults = FaultPlan(kill_at(rank=1, step=3), delay_at(rank=0, step=5, seconds=0.2))
    for step, batch in enumerate(batches):
        faults.reach(step)
        ...

The faults are real: a killed rank gets SIGKILL, with no chance to clean up.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.launch.environment import read_environment


class InjectedFault(PacelineError):
    """The error that ``raise_at`` raises."""


@dataclass(frozen=True)
class PlannedFault:
    """One thing that goes wrong; see ``kill_at`` and its neighbours.

    It happens in the ``attempt``-th start of the world only (0: before any restart), so that a run
    that a launcher restarts gets past it.
    """

    action: str
    rank: int
    step: int
    seconds: float = 0.0
    exit_code: int = 1
    attempt: int = 0


def kill_at(rank: int, step: int, *, attempt: int = 0) -> PlannedFault:
    """SIGKILL the rank: as an out-of-memory killer or a lost machine would."""
    return PlannedFault("kill", rank, step, attempt=attempt)


def exit_at(rank: int, step: int, *, exit_code: int = 1, attempt: int = 0) -> PlannedFault:
    """End the rank's process at once with ``exit_code``, without a traceback."""
    return PlannedFault("exit", rank, step, exit_code=exit_code, attempt=attempt)


def raise_at(rank: int, step: int, *, attempt: int = 0) -> PlannedFault:
    """Raise ``InjectedFault`` on the rank."""
    return PlannedFault("raise", rank, step, attempt=attempt)


def hang_at(rank: int, step: int, *, attempt: int = 0) -> PlannedFault:
    """Stop moving for ever, alive."""
    return PlannedFault("hang", rank, step, attempt=attempt)


def delay_at(rank: int, step: int, *, seconds: float, attempt: int = 0) -> PlannedFault:
    """Sleep for ``seconds``: a straggler."""
    return PlannedFault("delay", rank, step, seconds=seconds, attempt=attempt)


class FaultPlan:
    """Some faults; call ``reach`` at every step."""

    def __init__(self, *faults: PlannedFault) -> None:
        self.faults = faults

    def reach(self, step: int, rank: int | None = None) -> None:
        """Let the faults planned for this step happen; ``rank`` defaults to the launcher's."""
        place = read_environment()
        if rank is None:
            rank = 0 if place is None else place.rank
        attempt = 0 if place is None else place.restart_count
        for fault in self.faults:
            if (fault.rank, fault.step, fault.attempt) == (rank, step, attempt):
                _happen(fault)


def _happen(fault: PlannedFault) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    where = f"rank {fault.rank}, step {fault.step}"
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "exit":
        os._exit(fault.exit_code)
    elif fault.action == "raise":
        raise InjectedFault(f"a fault planned for {where}.")
    elif fault.action == "delay":
        time.sleep(fault.seconds)
    elif fault.action == "hang":
        while True:
            time.sleep(3600)
    else:
        raise ValueError(f"no such fault: {fault.action!r} ({where}).")
