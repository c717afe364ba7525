"""Which rank broke a run, and how to say so. Pure functions: no process is touched here."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RankFailed

_TAIL_LINES = 20
_TAIL_BYTES = 16384
# What usually lies behind a signal that nobody sent on purpose.
_SIGNAL_HINTS = {
    "SIGKILL": "often the machine ran out of memory",
    "SIGBUS": "often shared memory (/dev/shm) or the disk is full",
    "SIGSEGV": "a crash in native code",
    "SIGABRT": "native code gave up; its last lines say why",
    "SIGILL": "native code built for another kind of processor",
}


@dataclass(frozen=True)
class RankExit:
    """How one rank ended. ``exit_code`` is negative for a signal; ``time`` is when it went wrong.

    ``traceback`` and ``summary`` are empty unless the rank raised. ``lost_peer`` marks an error
    that only says that another rank is gone. ``ended_by_agent``: it was told to end, or killed,
    because another rank had failed.
    """

    rank: int
    exit_code: int
    time: float
    log: Path
    traceback: str = ""
    summary: str = ""
    lost_peer: bool = False
    ended_by_agent: bool = False

    @property
    def reason(self) -> str:
        """One line: the error, the signal or the exit code."""
        if self.summary:
            return self.summary.splitlines()[0]
        if self.exit_code < 0:
            name = _signal_name(-self.exit_code)
            hint = _SIGNAL_HINTS.get(name)
            return f"killed by {name}" + (f": {hint}" if hint else "")
        return f"exited with code {self.exit_code}"


def read_error(path: Path) -> tuple[str, str, float, bool] | None:
    """(traceback, summary, time, lost_peer) from an error file; ``None`` when there is none."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    message = report["message"]
    return (
        message["extraInfo"]["py_callstack"],
        message["message"],
        report["time"],
        report["lost_peer"],
    )


def culprit(exits: Sequence[RankExit]) -> RankExit:
    """The rank that broke the run.

    When one rank dies its peers' collectives fail too, and the agent ends the rest. So a failure
    of a rank's own comes before a lost peer, a lost peer before a rank the agent ended; among
    equals, the earliest.
    """
    return min(exits, key=lambda e: (e.ended_by_agent, e.lost_peer, e.time, e.rank))


def explain(
    exits: Sequence[RankExit], nproc: int, *, finished: Sequence[int] = (), shown: bool = False
) -> RankFailed:
    """The error for these failed ranks: the culprit's traceback, or its last lines, alone.

    ``finished`` are ranks that had already left with success. ``shown``: rank 0's output was on
    the console, so that its last lines need no repeating.
    """
    first = culprit(exits)
    evidence = first.traceback or log_tail(first.log)
    parts = [f"Rank {first.rank} of {nproc} failed: {first.reason}"]
    if first.traceback:
        parts.append(first.traceback)
    elif shown and first.rank == 0:
        parts.append("Its last lines are above.")
    elif evidence:
        parts.append(f"Its last lines:\n{evidence}")
    else:
        parts.append("It wrote nothing.")
    if first.lost_peer and finished:
        gone = ", ".join(str(rank) for rank in sorted(finished))
        parts.append(f"Already finished by then: rank {gone}. Ranks must leave together.")
    parts.append(f"Its whole log: {first.log}")
    return RankFailed(
        "\n\n".join(parts), rank=first.rank, exit_code=first.exit_code, traceback=evidence
    )


def log_tail(path: Path, lines: int = _TAIL_LINES) -> str:
    """The last lines of a log; empty when there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
