"""torch's elastic agent for the ranks of this machine, taught a few manners.

The agent starts the ranks, watches them, restarts them and tells whether they failed. Added here,
through the hooks it has for that: one log per rank; a stop that can be asked for from another
thread, gives ranks time to save and reaches only the ranks themselves, not their loader workers;
the exact order in which ranks ended; an end to processes that ranks leave behind.

Imports torch at the top, so it is itself imported only when ranks are about to start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from paceline.launch import guard, logs, worker
from paceline.launch.failure import RankExit, read_error

# Peers of a failed rank cannot save together any more: this long to leave, and no longer.
_FAILED_GRACE_SECONDS = 5.0
_MONITOR_SECONDS = 0.1
_ADDRESS = "127.0.0.1"  # a name would have to be looked up


class RankLogs(LogsSpecs):
    """Both streams of each rank in one file; error files out of sight in a folder of their own."""

    def __init__(self, log_dir: Path, scratch: Path, env: Mapping[str, str]) -> None:
        super().__init__()
        self._log_dir = log_dir
        self._scratch = scratch
        self._env = env
        self.attempt = -1

    @property
    def root_log_dir(self) -> str:
        """The folder of the first attempt's logs."""
        return str(self._log_dir)

    def log(self, rank: int) -> Path:
        """The log of a rank in the current attempt."""
        return logs.attempt_folder(self._log_dir, self.attempt) / f"rank{rank}.log"

    def error_file(self, rank: int) -> Path:
        """The file in which a rank of the current attempt reports the error that ends it."""
        return self._scratch / f"attempt{self.attempt}" / f"rank{rank}.json"

    def quiet_point(self, rank: int) -> Path:
        """The file in which a rank notes how much of its output is for the console."""
        return Path(f"{self.error_file(rank)}.quiet")

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Choose the files of a new attempt, and complete the environment of its ranks."""
        self.attempt = logs.next_attempt(self._log_dir)
        self.log(0).parent.mkdir(parents=True, exist_ok=True)
        self.error_file(0).parent.mkdir(parents=True, exist_ok=True)
        for rank, env in envs.items():
            env.update(self._env)
            env[worker.ERROR_FILE] = str(self.error_file(rank))
            env[worker.LOG_FILE] = str(self.log(rank).absolute())
            env[worker.LAUNCHER_PID] = str(os.getpid())
            self.log(rank).touch()
        # Each rank opens its log itself, once for both streams. The agent would open it twice,
        # so that the streams write over each other, and not close it when the rank ends.
        inherited = dict.fromkeys(envs, "")
        errors = {rank: str(self.error_file(rank)) for rank in envs}
        return LogsDest(stdouts=inherited, stderrs=inherited, error_files=errors)


class LocalRendezvous(RendezvousHandler):
    """The meeting place of the ranks of one machine: a new store for every start.

    Torch's c10d rendezvous keeps one store over restarts, in which restarted Gloo ranks may find
    the addresses of their predecessors, and then wait for the dead (torch 2.11 to 2.13; a test
    says when that is over). Port 0 is any free one, so that launches never clash.
    """

    use_agent_store = True  # ranks use the store that the launcher hosts; none of them hosts one

    def __init__(self) -> None:
        self._run_id = f"paceline-{uuid.uuid4().hex}"
        self._closed = False

    def next_rendezvous(self) -> RendezvousInfo:
        """This machine is all there is: node 0 of 1."""
        store = TCPStore(_ADDRESS, 0, is_master=True, wait_for_workers=False)
        meeting_place = RendezvousStoreInfo(_ADDRESS, store.port)
        return RendezvousInfo(PrefixStore("agent", store), 0, 1, meeting_place)

    def num_nodes_waiting(self) -> int:
        """No other machine ever asks to join."""
        return 0

    def get_backend(self) -> str:
        """A name for the agent's records."""
        return "local"

    def get_run_id(self) -> str:
        """What tells this launch from every other."""
        return self._run_id

    def is_closed(self) -> bool:
        """Whether the launch is over."""
        return self._closed

    def set_closed(self) -> None:
        """The launch is over."""
        self._closed = True

    def shutdown(self) -> bool:
        """Nothing to close: a store ends with its last user."""
        self._closed = True
        return True


class Agent(LocalElasticAgent):
    """Runs the ranks of one launch; ``run()`` belongs in a thread, the rest to any other."""

    def __init__(
        self,
        command: list[str],
        nproc: int,
        *,
        max_restarts: int,
        rank_logs: RankLogs,
        keeper: guard.Guard,
        grace: float,
        on_start: Callable[[int], None],
    ) -> None:
        # -P: the rank's script decides what is on its path, not the folder it is started in.
        arguments = ["-P", "-m", "paceline.launch.worker", *command]
        spec = WorkerSpec(
            role="rank",
            local_world_size=nproc,
            entrypoint=sys.executable,
            # The agent would replace $-macros in arguments; "$$" is how it writes a plain "$".
            args=tuple(a.replace("$", "$$") for a in arguments),
            rdzv_handler=LocalRendezvous(),
            max_restarts=max_restarts,
            monitor_interval=_MONITOR_SECONDS,
            local_addr=_ADDRESS,
        )
        super().__init__(spec, rank_logs)
        self.failures: list[RankExit] = []
        self.finished: list[int] = []
        self._rank_logs = rank_logs
        self._guard = keeper
        self._grace = grace
        self._on_start = on_start
        self._stop_signal: signal.Signals | None = None
        self._watchers: dict[int, _Watcher] = {}
        self._monitoring_since: float | None = None

    # What other threads may ask.

    def request_stop(self, signum: signal.Signals) -> None:
        """Have the ranks sent ``signum`` and, after the grace period, killed."""
        self._stop_signal = signum

    def ask_to_save(self) -> None:
        """Have the ranks save a checkpoint. Not their children: to those it may mean the end."""
        for watcher in self._watchers.values():
            if watcher.ended is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(watcher.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """Kill every rank and what it started, now."""
        guard.signal_groups([w.pid for w in self._watchers.values()], signal.SIGKILL)

    def kill_overdue(self) -> None:
        """Kill ranks that should be gone: those that raised, and peers of a failed one."""
        since = self._monitoring_since
        ending = since is not None and time.monotonic() - since > _FAILED_GRACE_SECONDS
        for rank, watcher in self._watchers.items():
            if watcher.ended is None and (ending or self._raised_long_ago(rank)):
                watcher.killed_as_overdue = True
                guard.signal_groups([watcher.pid], signal.SIGKILL)

    def _raised_long_ago(self, rank: int) -> bool:
        try:
            raised = self._rank_logs.error_file(rank).stat().st_mtime
        except FileNotFoundError:
            return False
        return time.time() - raised > self._grace

    # What the elastic agent asks of a subclass.

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._stop_if_asked()
        pids: dict[int, int] = super()._start_workers(worker_group)
        self._guard.watch(pids.values())
        self._watchers = {rank: _Watcher(pid) for rank, pid in pids.items()}
        self._on_start(self._rank_logs.attempt)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._stop_if_asked()
        # On a failure the agent ends the other ranks in here, with a patience of its own.
        self._monitoring_since = time.monotonic()
        result: RunResult = super()._monitor_workers(worker_group)
        self._monitoring_since = None
        if result.state == WorkerState.FAILED:
            self._note_failures(result)
        return result

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None
    ) -> None:
        running = [w for w in self._watchers.values() if w.ended is None]
        for watcher in running:
            watcher.send(death_sig)
        deadline = time.monotonic() + self._grace
        for watcher in running:
            watcher.wait(deadline - time.monotonic())
        super()._shutdown(signal.SIGKILL)
        groups = [w.pid for w in self._watchers.values()]
        guard.end_groups(groups)
        self._guard.forget(groups)
        self._watchers = {}

    def _stop_if_asked(self) -> None:
        if self._stop_signal is not None:
            raise SignalException("stop requested", self._stop_signal)

    def _note_failures(self, result: RunResult) -> None:
        for watcher in self._watchers.values():
            watcher.wait(1.0)  # the agent has seen them all end; so will the watchers
        ends = {rank: w.ended or time.time() for rank, w in self._watchers.items()}
        first_end = min(ends[rank] for rank in result.failures)
        self.finished = [rank for rank in ends if rank not in result.failures]
        self.failures = []
        for rank, failure in result.failures.items():
            overdue = self._watchers[rank].killed_as_overdue
            error = read_error(self._rank_logs.error_file(rank))
            traceback, summary, raised, lost_peer = error or ("", "", ends[rank], False)
            told_to_end = failure.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM)
            self.failures.append(
                RankExit(
                    rank=rank,
                    # A rank that raised leaves with 1, unless something hit it on its way out.
                    exit_code=1 if error else failure.exitcode,
                    time=raised,
                    log=self._rank_logs.log(rank),
                    traceback=traceback,
                    summary=summary,
                    lost_peer=lost_peer,
                    ended_by_agent=not error
                    and (overdue or (told_to_end and ends[rank] > first_end)),
                )
            )


class _Watcher:
    """Notes when a rank ends, without taking its exit status from the agent."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: float | None = None
        self.killed_as_overdue = False
        self._thread = threading.Thread(target=self._watch, name=f"rank-{pid}", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait for the rank to end, no longer than ``seconds``."""
        self._thread.join(max(0.0, seconds))

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to the rank alone, not to what it started."""
        if self.ended is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def _watch(self) -> None:
        if hasattr(os, "waitid"):
            # Suppressed: the agent was faster and has already collected it.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:
            while guard.is_running(self.pid):
                time.sleep(_MONITOR_SECONDS / 2)
        self.ended = time.time()
