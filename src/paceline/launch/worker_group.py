"""The worker group of this node: its ranks in one world, started together, ended together."""

from __future__ import annotations

import signal
import threading
import time

from paceline.launch import exit_codes, process_reaper
from paceline.launch.environment import RankAssignment, rank_variables
from paceline.launch.failure import RankExit, how_it_ended
from paceline.launch.logs import RankLogs
from paceline.launch.processes import RankProcess, Starter

# Peers of a failed rank mostly notice by themselves, and their error reports are worth having.
_NOTICE_SECONDS = 0.1


class LocalWorkerGroup:
    """The rank processes of this node. One thread starts and ends them; any may signal or kill."""

    def __init__(
        self, starter: Starter, logs: RankLogs, reaper: process_reaper.ProcessReaper
    ) -> None:
        self._starter = starter
        self._logs = logs
        self._reaper = reaper
        self._processes: dict[int, RankProcess] = {}

    def start(self, assignment: RankAssignment) -> None:
        """Start the ranks of this node."""
        self._processes = {}
        for rank in assignment.ranks:
            env = rank_variables(assignment, rank, self._logs)
            # A new dict each time: another thread may be looking at the old one.
            self._processes = {**self._processes, rank: self._starter.start(rank, env)}

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    @property
    def exit_codes(self) -> dict[int, int]:
        """The exit codes of the ranks that have left, by rank."""
        found = {rank: process.exit_code for rank, process in self._processes.items()}
        return {rank: code for rank, code in found.items() if code is not None}

    @property
    def is_done(self) -> bool:
        """Whether all have left with success; true as well for a group without ranks."""
        return all(process.exit_code == 0 for process in self._processes.values())

    def send(self, signum: signal.Signals) -> None:
        """Signal the ranks that still run. Not their children: to those it may mean the end."""
        for process in self._processes.values():
            process.send(signum)

    def kill(self) -> None:
        """Kill every rank and what it started, now."""
        process_reaper.signal_groups(self.pids.values(), signal.SIGKILL)

    def kill_those_that_raised(self, seconds: float) -> None:
        """Kill ranks that reported an error over ``seconds`` ago and are still there."""
        for rank, process in self._processes.items():
            if process.ended is None and self._raised_before(rank, time.time() - seconds):
                process.killed_as_overdue = True
                process.kill()

    def _raised_before(self, rank: int, moment: float) -> bool:
        try:
            return self._logs.error_file(rank).stat().st_mtime < moment
        except FileNotFoundError:
            return False

    def wait(self, seconds: float) -> bool:
        """Wait for all to leave, no longer than ``seconds``; whether they have."""
        deadline = time.monotonic() + seconds
        for process in self._processes.values():
            process.wait(deadline - time.monotonic())
        return all(process.ended is not None for process in self._processes.values())

    def end_after_failure(self, seconds: float) -> None:
        """One has failed: let the others leave by themselves, then ask them to, then kill them."""
        if self.wait(_NOTICE_SECONDS):
            return
        self.send(signal.SIGTERM)
        if not self.wait(seconds):
            for process in self._processes.values():
                process.killed_as_overdue |= process.ended is None
            self.kill()
            self.wait(threading.TIMEOUT_MAX)

    def failures(self) -> list[RankExit]:
        """How the failed ranks ended; not those that saved and left because they were asked to."""
        ended = {
            rank: process
            for rank, process in self._processes.items()
            if process.exit_code not in (0, None, *exit_codes.SAVED_AND_LEFT)
            or self._logs.error_file(rank).exists()
        }
        first_end = min((p.ended or 0.0 for p in ended.values()), default=0.0)
        return [
            how_it_ended(
                rank,
                process.exit_code or 0,
                process.ended or time.time(),
                log=self._logs.log(rank),
                error_file=self._logs.error_file(rank),
                first_end=first_end,
                overdue=process.killed_as_overdue,
            )
            for rank, process in ended.items()
        ]

    def finished(self) -> list[int]:
        """The ranks that have left with success."""
        return [rank for rank, code in self.exit_codes.items() if code == 0]

    def end(self) -> None:
        """Kill the ranks that still run, and end whatever processes they have left behind."""
        groups = list(self.pids.values())
        for process in self._processes.values():
            if process.ended is None:
                process.kill()
        self.wait(threading.TIMEOUT_MAX)
        process_reaper.end_groups(groups)
        self._reaper.forget(groups)
        for process in self._processes.values():
            process.collect()
        self._processes = {}
