"""The processes of ranks: started cold, or from a standby process that has torch imported already.

Each leads a session of its own, dies with its launcher (see worker.py and process_reaper.py), and
is noticed the moment it ends. Whatever starts a process here must be called by one thread that
lives as long as the launch: Linux ends a process "with its parent" when the thread that started it
ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from paceline.launch import process_reaper
from paceline.launch.environment import inherited_variables
from paceline.launch.launchers import LAUNCHER_PID

_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 2.0
# Loading torch for a standby takes cores from ranks: not while they start themselves, and one
# standby after the other.
_STANDBY_AFTER_SECONDS = 2.0
_STANDBY_DEATHS = 3


class Handle(Protocol):
    """What a process was started as."""

    pid: int

    def wait(self) -> int:
        """Its exit code, once it has ended."""


class RankProcess:
    """A running rank. It stays a zombie until ``collect``: its pid means it alone till then."""

    def __init__(self, rank: int, process: Handle, on_end: Callable[[], None]) -> None:
        self.rank = rank
        self.pid = process.pid
        self.ended: float | None = None
        """When it ended, ``None`` while it runs."""
        self.exit_code: int | None = None
        """Negative for a signal; ``None`` while it runs."""
        self.killed_as_overdue = False
        self._process = process
        self._on_end = on_end
        self._thread = threading.Thread(target=self._watch, name=f"rank-{rank}", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for it to end, no longer than ``seconds``; whether it has."""
        self._thread.join(max(0.0, seconds))
        return self.ended is not None

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to the rank alone, not to what it started."""
        if self.ended is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        """Kill it and all it started, now."""
        process_reaper.signal_groups([self.pid], signal.SIGKILL)

    def collect(self) -> None:
        """Reap a process that has ended."""
        self._thread.join()
        self._process.wait()

    def _watch(self) -> None:
        if hasattr(os, "waitid"):
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            assert found is not None
            exited = found.si_code == os.CLD_EXITED
            self.exit_code = found.si_status if exited else -found.si_status
        else:
            while process_reaper.is_running(self.pid):
                time.sleep(_POLL_SECONDS)
            self.exit_code = self._process.wait()
        self.ended = time.time()
        self._on_end()


class Starter:
    """Starts ranks that all run the same command; keeps standbys for the next start.

    ``base_env`` is what every rank gets beside its own variables and this process's environment,
    ``inherited`` are descriptors that it gets.
    """

    def __init__(
        self,
        command: Sequence[str],
        base_env: Mapping[str, str],
        *,
        reaper: process_reaper.ProcessReaper,
        on_end: Callable[[], None],
        inherited: Sequence[int] = (),
    ) -> None:
        self._inherited = inherited
        self._command = list(command)
        self._base_env = {**base_env, LAUNCHER_PID: str(os.getpid())}
        self._reaper = reaper
        self._on_end = on_end
        self._standbys: list[_Standby] = []
        self._due: float | None = None
        self._died = 0

    def start(self, rank: int, env: Mapping[str, str]) -> RankProcess:
        """Start a rank, from a standby if one is ready."""
        whole = {**inherited_variables(), **self._base_env, **env}
        process = self._from_standby(whole) or _popen(
            self._command, whole, pass_fds=self._inherited
        )
        self._reaper.watch([process.pid])
        return RankProcess(rank, process, self._on_end)

    def tend_standbys(self, wanted: int, *, moving: Callable[[], bool]) -> None:
        """Bring standbys up to ``wanted``, one after the other, once the ranks are ``moving``."""
        for standby in [s for s in self._standbys if not s.look()]:
            self._standbys.remove(standby)
            self._end([standby])
            self._died += 1
        # Some die on this machine (of its memory, say): then there are none, and no more are tried.
        enough = len(self._standbys) >= wanted or self._died >= _STANDBY_DEATHS
        if enough or not all(standby.ready for standby in self._standbys):
            return
        now = time.monotonic()
        if self._due is None or now < self._due:
            self._due = now + _STANDBY_AFTER_SECONDS if self._due is None else self._due
        elif moving():
            env = {**inherited_variables(), **self._base_env}
            self._standbys.append(_Standby(self._command, env, self._inherited))
            self._reaper.watch([self._standbys[-1].pid])
        else:
            self._due = now + _STANDBY_AFTER_SECONDS

    @property
    def standbys(self) -> list[int]:
        """The process ids of those that are ready."""
        return [standby.pid for standby in self._standbys if standby.look() and standby.ready]

    def stop_loading(self) -> None:
        """The ranks start again: a standby that is not ready yet would only be in their way."""
        loading = [s for s in self._standbys if not (s.look() and s.ready)]
        self._standbys = [s for s in self._standbys if s not in loading]
        self._end(loading)
        self._due = None

    def close(self) -> None:
        """End all standbys."""
        standbys, self._standbys = self._standbys, []
        self._end(standbys)

    def _from_standby(self, env: Mapping[str, str]) -> Handle | None:
        while self._standbys:
            standby = self._standbys.pop(0)
            if standby.ready and standby.become_rank(self._command, env):
                return standby
            self._end([standby])
        return None

    def _end(self, standbys: Sequence[_Standby]) -> None:
        for standby in standbys:
            standby.end()
        self._reaper.forget([standby.pid for standby in standbys])


class _Standby:
    """A process that imports what ranks need, then waits for the order to become one."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], inherited: Sequence[int]
    ) -> None:
        self._line, theirs = socket.socketpair()
        self._line.setblocking(False)
        with theirs:
            self._process = _popen(
                ["--standby", str(theirs.fileno()), *command],
                env,
                pass_fds=[theirs.fileno(), *inherited],
                # It prints nothing before it is a rank, and then it has a log of its own.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self.pid = self._process.pid
        self.ready = False

    def look(self) -> bool:
        """See whether it is ready; false when it is gone."""
        try:
            said = self._line.recv(64)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.ready = self.ready or said != b""
        return said != b""

    def become_rank(self, command: Sequence[str], env: Mapping[str, str]) -> bool:
        """Have it run ``command`` as a rank; false when it is gone."""
        try:
            cwd = os.getcwd()
        except FileNotFoundError:  # removed, while we are in it: so is the standby
            cwd = None
        order = {"arguments": list(command), "env": dict(env), "cwd": cwd}
        self._line.settimeout(_ANSWER_SECONDS)
        try:
            self._line.sendall(json.dumps(order).encode() + b"\n")
            # One that is being killed would take the order, and not live to carry it out.
            taken = self._line.recv(64) != b""
        except OSError:
            return False
        self._line.close()
        return taken

    def end(self) -> None:
        """Kill it: there is nothing in it to save."""
        self._line.close()
        process_reaper.signal_groups([self.pid], signal.SIGKILL)
        self._process.wait()

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        return self._process.wait()


def _popen(
    arguments: Sequence[str],
    env: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
    stdout: int | None = None,
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # -P: the rank's script decides what is on its path, not the folder it is started in.
        [sys.executable, "-P", "-m", "paceline.launch.worker", *arguments],
        env=dict(env),
        pass_fds=pass_fds,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )
