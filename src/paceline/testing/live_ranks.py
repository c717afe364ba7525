"""The processes behind a pool, seen from its owner: the server, and the ranks forked from it."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError
from paceline.testing.protocol import FORK, KILL, REAP, REPLY, REQUEST, STACK_SIGNAL

LEAK_TAG = "PACELINE_LEAK_TAG"
"""Set while a test under leak checks runs: what it starts is known by it, even orphaned."""


class LiveRank:
    """One rank's process: a connection to it, and the files it writes."""

    def __init__(self, pid: int, descriptor: int, folder: Path) -> None:
        self.pid = pid
        self.connection = Connection(descriptor)
        self._output = folder / f"{pid}.out"
        self._stacks = folder / f"{pid}.stack"
        self.exit_code: int | None = None
        # Children that a job forked may hold the connection open after the rank is dead: where
        # the system can, watch the process itself.
        self._exit: int | None = None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._exit = os.pidfd_open(pid)

    @property
    def signs(self) -> list[Any]:
        """What to wait on: readable when the rank has said something or has ended."""
        return [self.connection] if self._exit is None else [self.connection, self._exit]

    def send(self, message: bytes) -> None:
        """Send a message; a rank that has ended is found by the next ``receive``."""
        with contextlib.suppress(ConnectionError):
            self.connection.send_bytes(message)

    def receive(self) -> Any:
        """The next message; raises ``EOFError`` when the rank has ended without one."""
        try:
            if self._exit is None or self.connection.poll():
                return pickle.loads(self.connection.recv_bytes())
        except ConnectionError:
            pass
        raise EOFError

    def output(self) -> str:
        """What the last job printed."""
        return _read(self._output)

    def stack(self) -> str:
        """Where each thread of the process is now, in Python."""
        before = len(_read(self._stacks))
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, STACK_SIGNAL)
        deadline = time.monotonic() + 2
        while 'File "' not in _read(self._stacks)[before:]:
            if time.monotonic() > deadline:
                return "(no Python stack: the process is stopped or does not answer signals)"
            time.sleep(0.01)
        time.sleep(0.05)  # let it finish writing
        return _without_pool_frames(_read(self._stacks)[before:])

    def crash_report(self) -> str:
        """What Python wrote when a fatal signal hit the process, if it did."""
        return _without_pool_frames(_read(self._stacks).partition("Extension modules:")[0])

    def release(self) -> None:
        """Close what this process holds of a rank that has ended."""
        self.connection.close()
        if self._exit is not None:
            os.close(self._exit)
        self._output.unlink(missing_ok=True)
        self._stacks.unlink(missing_ok=True)


class RankServer:
    """The process that imports torch once and forks ranks; see ``paceline.testing.server``."""

    def __init__(self, preload: Sequence[str], environ: Mapping[str, str]) -> None:
        self._preload = preload
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-ranks-"))
        self._store: Any = None
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "paceline.testing.server"),
                    *(str(theirs.fileno()), str(self._folder), *preload),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the owner of the pool
                env=dict(environ),
            )
        _servers.add(self)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can still fork."""
        return self._process.poll() is None

    @property
    def store_port(self) -> int:
        """The port of a store that lives as long as this server."""
        if self._store is None:
            self._store = serve_store()
        return int(self._store.port)

    def fork(self) -> LiveRank:
        """A new rank."""
        data, descriptors = b"", list[int]()
        with contextlib.suppress(ConnectionError):
            self._control.sendall(REQUEST.pack(FORK, self.store_port))
            data, descriptors, _, _ = socket.recv_fds(self._control, REPLY.size, 1)
        if len(data) != REPLY.size:
            raise LaunchError(
                "the process that ranks are forked from could not start or has died; what it "
                f"printed is above. It runs `{sys.executable} -m paceline.testing.server` and "
                f"imports {', '.join(self._preload)}."
            )
        return LiveRank(REPLY.unpack(data)[0], descriptors[0], self._folder)

    def collect(self, rank: LiveRank) -> int:
        """The exit code of a rank that has died by itself, negative for a signal."""
        return self._end(rank, REAP)

    def kill(self, rank: LiveRank) -> None:
        """End a rank at once, with whatever it started; no harm when it has ended already."""
        self._end(rank, KILL)

    def _end(self, rank: LiveRank, command: bytes) -> int:
        if rank.exit_code is None:
            data = b""
            with contextlib.suppress(ConnectionError):
                self._control.sendall(REQUEST.pack(command, rank.pid))
                data = self._control.recv(REPLY.size, socket.MSG_WAITALL)
            # Without an answer the server is gone, and its ranks with it.
            status = REPLY.unpack(data)[1] if len(data) == REPLY.size else signal.SIGKILL
            rank.exit_code = os.waitstatus_to_exitcode(status)
        return rank.exit_code

    def close(self) -> None:
        """End the server and every rank that is left."""
        _servers.discard(self)
        self._control.close()
        self._process.wait()
        self._store = None
        shutil.rmtree(self._folder, ignore_errors=True)


def _without_pool_frames(stack: str) -> str:
    """A stack as faulthandler writes it, innermost call first, cut where the job was called."""
    ours = (f'File "{Path(__file__).parent}', 'File "<frozen runpy>"')
    lines = stack.strip().splitlines()
    return "\n".join(line for line in lines if not line.strip().startswith(ours))


def live_servers() -> list[RankServer]:
    """The servers of this process that have not been closed."""
    return list(_servers)


def serve_store() -> Any:
    """A store served by this process, on loopback only, at a port the system picks.

    No race for a free port, and a rank that dies does not take the store along.
    """
    from paceline.launch.rendezvous.stores import serve

    return serve("127.0.0.1", 0)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


_servers: weakref.WeakSet[RankServer] = weakref.WeakSet()
