"""What a test may leave behind without meaning to, and how it is found.

Looks for processes the test started (orphans of processes it started too), ports this process
listens on, environment variables, new files in the working directory, a changed working directory,
torch's default process group and its default dtype. What is found is ended or put back, so that
the next test starts clean. Processes and ports are seen on Linux only.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
import uuid
from pathlib import Path

from paceline.testing.live_ranks import LEAK_TAG, live_servers
from paceline.testing.processes import (
    ancestors,
    command_line,
    is_alive,
    listening_ports,
    pids,
    was_started_with,
)

_SECONDS_TO_END = 5.0
# Set by pytest for each test, and by libraries when they are first used.
_IGNORED_VARIABLES = (
    *("PYTEST_", "CUDA_", "KMP_", "OMP_", "TORCH", "TRITON_", "TF_", "TOKENIZERS_", "MLFLOW_"),
    *("LC_CTYPE", "XDG_", "HF_", "GIT_PYTHON_", "PROTOCOL_BUFFERS_", "RAY_"),
)
# They serve the multiprocessing module for as long as this process lives.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


_session_processes: set[int] = set()


def serves_the_session(pid: int) -> None:
    """Tell leak checks of a process that is started in a test, but serves later ones as well."""
    _session_processes.add(pid)


class LeakCheck:
    """Looks around when made, and again in ``leaks``."""

    def __init__(self) -> None:
        self._environ = dict(os.environ)
        self._tag = uuid.uuid4().hex
        # Tests may run tests: what those start is theirs and ours.
        os.environ[LEAK_TAG] = self._environ.get(LEAK_TAG, "") + ":" + self._tag
        self._folder = os.getcwd()
        self._files = _files(self._folder)
        self._ports = listening_ports()
        self._processes = pids()
        self._dtype = _default_dtype()
        self._had_group = _has_process_group()

    def leaks(self) -> list[str]:
        """One line for each thing that was not there before; it is ended or put back."""
        return [
            *self._leaked_group(),  # first: its sockets and threads go with it
            *self._leaked_processes(),
            *self._leaked_ports(),
            *self._leaked_environment(),
            *self._leaked_files(),
            *self._leaked_dtype(),
        ]

    def _leaked_group(self) -> list[str]:
        if self._had_group or not _has_process_group():
            return []
        from paceline.world.world import leave

        leave()
        if _has_process_group():
            sys.modules["torch.distributed"].destroy_process_group()
        return ["torch's default process group (close the World, or destroy_process_group())"]

    def _leaked_processes(self) -> list[str]:
        deadline = time.monotonic() + _SECONDS_TO_END
        while (found := self._new_processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        lines = [f"process {pid}: {command}" for pid, command in found.items()]
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return lines

    def _new_processes(self) -> dict[int, str]:
        """Ours by descent, or by the tag; those of a pool of ranks are the pool's business."""
        pools = {server.pid for server in live_servers()}
        found = {}
        for pid in sorted(pids() - self._processes - pools - _session_processes):
            above = ancestors(pid)
            ours = os.getpid() in above or was_started_with(pid, LEAK_TAG, self._tag)
            command = command_line(pid)
            if ours and is_alive(pid) and not pools & set(above) and not _is_helper(command):
                found[pid] = command
        return found

    def _leaked_ports(self) -> list[str]:
        if not self._new_ports():
            return []
        gc.collect()  # a server in a reference cycle closes with it
        return [f"a socket listening on port {port}" for port in self._new_ports()]

    def _new_ports(self) -> list[int]:
        pools = {server.store_port for server in live_servers()}
        now = listening_ports().items()
        return sorted(port for sock, port in now if sock not in self._ports and port not in pools)

    def _leaked_environment(self) -> list[str]:
        del os.environ[LEAK_TAG]
        if LEAK_TAG in self._environ:
            os.environ[LEAK_TAG] = self._environ[LEAK_TAG]
        before, now = self._environ, dict(os.environ)
        lines = []
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) == now.get(name) or name.startswith(_IGNORED_VARIABLES):
                continue
            was = "unset" if name not in before else repr(before[name])
            is_now = "unset" if name not in now else repr(now[name])
            lines.append(f"environment variable {name}: {was} before, {is_now} now")
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
        return lines

    def _leaked_files(self) -> list[str]:
        lines = []
        if os.getcwd() != self._folder:
            lines.append(f"working directory {os.getcwd()} (was {self._folder})")
            os.chdir(self._folder)
        new = _files(self._folder) - self._files
        return lines + [f"file {Path(self._folder) / name}" for name in sorted(new)]

    def _leaked_dtype(self) -> list[str]:
        now = _default_dtype()
        if now == self._dtype or self._dtype is None:
            return []
        sys.modules["torch"].set_default_dtype(self._dtype)
        return [f"torch's default dtype {now} (was {self._dtype})"]


def _files(folder: str) -> set[str]:
    """Names in ``folder``; caches and other hidden files are nobody's leak."""
    return {name for name in os.listdir(folder) if not name.startswith((".", "__pycache__"))}


def _is_helper(command: str) -> bool:
    return any(helper in command for helper in _HELPERS)


def _has_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _default_dtype() -> object:
    torch = sys.modules.get("torch")
    return None if torch is None else torch.get_default_dtype()
