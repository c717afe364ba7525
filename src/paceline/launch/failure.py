"""Which rank broke a run, and the error that reports it. Pure functions: no process here."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RankFailed
from paceline.launch import error_report, exit_codes, restart_policy

_CHECKPOINT_ERROR = "paceline.errors.CheckpointError"
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
# What torch writes before it aborts a rank whose NCCL collective failed: its peer is gone, or has
# not come in time. No Python code sees it.
_WATCHDOG_GAVE_UP = "watchdog thread terminated with exception"
# Those that come from outside; the others a process brings upon itself.
_SENT_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class RankExit:
    """How one rank ended. ``exit_code`` is negative for a signal; ``time`` is when it went wrong.

    ``traceback`` and ``summary`` are empty unless the rank raised. ``lost_peer`` marks an error
    that only says that another rank is gone. ``ended_by_agent``: it was asked to end, or killed,
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
    types: tuple[str, ...] = ()
    """The qualified names of the exception's class and of its bases; empty unless it raised."""
    context: str = ""
    """Where it was when it raised: its collective, and the peers it knew to have left."""
    from_paceline: bool = False
    """Whether only Paceline's own code led to the error, none of the user's."""

    @property
    def refused(self) -> bool:
        """Whether Paceline refused something that only the user can fix, and its message says why.

        A mistake, or a checkpoint that does not fit, cannot be read or cannot be written.
        """
        fixable = restart_policy.is_users_mistake(self.types) or _CHECKPOINT_ERROR in self.types
        return self.from_paceline and fixable

    @property
    def reason(self) -> str:
        """One line: the error, the signal or the exit code."""
        if self.lost_peer and self.context:  # which says more than a broken connection does
            return f"lost a peer {self.context.splitlines()[0]}"
        if self.summary:
            return self.summary.splitlines()[0]
        if self.exit_code < 0:
            name = _signal_name(-self.exit_code)
            hint = _SIGNAL_HINTS.get(name)
            return f"killed by {name}" + (f": {hint}" if hint else "")
        return f"exited with code {self.exit_code}"


def how_it_ended(
    rank: int,
    exit_code: int,
    ended: float,
    *,
    log: Path,
    error_file: Path,
    first_end: float,
    overdue: bool,
) -> RankExit:
    """What became of a rank that did not leave with success, from what it left behind.

    ``first_end`` is when the first of the failed ranks ended; ``overdue``: it had to be killed
    because it did not leave after another had failed.
    """
    error = error_report.read(error_file)
    if error is not None:
        return RankExit(
            rank=rank,
            exit_code=1,  # as a rank that raised does, unless something hit it on its way out
            time=error.time,
            log=log,
            traceback=error.traceback,
            summary=error.summary,
            lost_peer=error.lost_peer,
            types=error.types,
            context=error.context,
            from_paceline=error.from_paceline,
        )
    told_to_end = exit_code in (-signal.SIGTERM, exit_codes.TOLD_TO_LEAVE)
    chose_to_leave = Path(f"{error_file}.exit").exists()
    return RankExit(
        rank=rank,
        exit_code=exit_code,
        time=ended,
        log=log,
        lost_peer=exit_code == -signal.SIGABRT and _WATCHDOG_GAVE_UP in log_tail(log, 100),
        ended_by_agent=overdue or (told_to_end and ended > first_end),
        types=("builtins.SystemExit",) if chose_to_leave else (),
    )


def ending_of(
    exit_: RankExit, *, step: int | None, moved: bool | None, seconds: float
) -> restart_policy.Ending:
    """What the failure of a rank means for its world, which ran for ``seconds``."""
    name = exit_.types[0] if exit_.types else ""
    # Somebody wanted it to end.
    interrupted = exit_.exit_code in (exit_codes.INTERRUPTED, -signal.SIGINT)
    return restart_policy.Ending(
        kind="failure",
        error=exit_.reason,
        step=step,
        raised=name.rpartition(".")[2] if exit_.summary else "",
        users_mistake=interrupted or restart_policy.is_users_mistake(exit_.types),
        killed=-exit_.exit_code in _SENT_SIGNALS,
        moved=moved,
        seconds=seconds,
        refused=exit_.refused,
    )


def culprit(exits: Sequence[RankExit]) -> RankExit:
    """The rank that broke the run.

    When one rank dies its peers' collectives fail too, and the agent ends the rest. So a failure
    of a rank's own comes before a lost peer, a lost peer before a rank the agent ended; among
    equals, the earliest.
    """
    return min(exits, key=lambda e: (e.ended_by_agent, e.lost_peer, e.time, e.rank))


def explain(
    exits: Sequence[RankExit],
    nproc: int,
    *,
    finished: Sequence[int] = (),
    shown: bool = False,
    host: str = "",
    no_restart: str = "",
    would_recur: bool = False,
) -> RankFailed:
    """The error for these failed ranks: the culprit's traceback, or its last lines, alone.

    ``finished`` are ranks that had already left with success. ``shown``: rank 0's output was on
    the console, so that its last lines need no repeating. ``host`` is named where there are
    several; ``no_restart`` is why the ranks are not started again, ``would_recur``: that they
    would end the same way. A mistake that Paceline reports itself needs no traceback.
    """
    first = culprit(exits)
    where = f" on {host}" if host else ""
    if first.refused:
        return RankFailed(
            f"Rank {first.rank} of {nproc}{where} failed: {_sentence(first.summary)}\n\n"
            f"Its whole log, with the traceback: {first.log}",
            rank=first.rank,
            exit_code=first.exit_code,
            traceback=first.traceback,
            would_recur=would_recur,
        )
    # A crash in native code leaves its message and the stacks of all threads.
    lines = 2 * _TAIL_LINES if first.exit_code < 0 else _TAIL_LINES
    evidence = first.traceback or log_tail(first.log, lines)
    parts = [f"Rank {first.rank} of {nproc}{where} failed: {first.reason}"]
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
    if first.exit_code < 0 and (others := [e for e in exits if e.lost_peer and e.context]):
        lines_of_peers = "\n".join(f"  rank {e.rank}: {e.context}" for e in others)
        parts.append(f"Where its peers lost it:\n{lines_of_peers}")
    if no_restart:
        parts.append(f"Not started again: {no_restart}.")
    parts.append(f"Its whole log: {first.log}")
    return RankFailed(
        "\n\n".join(parts),
        rank=first.rank,
        exit_code=first.exit_code,
        traceback=evidence,
        would_recur=would_recur,
    )


def _sentence(summary: str) -> str:
    """The summary of an error of Paceline's without the name of its class."""
    name, colon, rest = summary.partition(": ")
    return rest if colon and " " not in name else summary


def log_tail(path: Path, lines: int = _TAIL_LINES) -> str:
    """The last lines of a log; empty when there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
