"""``subprocess.Popen`` with forks of a server for what is this Python."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from warm.order import Order, send
from warm.server import PID, room

_SET_CHILD_SUBREAPER = 36
_TESTS = str(Path(__file__).parents[1])
_COMMAND = str(Path(sys.executable).with_name("paceline"))
_SERVER = """
import sys
base = sys.path[:]
sys.path.insert(0, {tests!r})
from warm.server import main
sys.path[:] = base
main(int(sys.argv[1]), base)
"""
# Others change how Python itself starts, which a fork cannot make up for.
_FOLLOWED = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONWARNINGS")
_ORIGINAL = subprocess.Popen


class _Client:
    """The line to the server of this process, which is started when it is first needed."""

    def __init__(self) -> None:
        self.line: socket.socket | None = None
        self.server: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()
        self.on_start: Callable[[int], None] = lambda pid: None
        self.is_off = False
        self.owner = os.getpid()

    def start(self, order: Order, files: Sequence[int]) -> int | None:
        """The process id of what was started; ``None`` where there is no server."""
        with self.lock:
            if self.owner != os.getpid():
                return None  # a fork: the line is its parent's
            if self.line is None and not self.is_off:
                self._start_server()
            if self.is_off or self.line is None:
                return None
            _take_orphans(True)
            try:
                send(self.line, order, files)
                answer = self.line.recv(PID.size, socket.MSG_WAITALL)
            except ConnectionError:
                answer = b""
            finally:
                _take_orphans(False)
            if len(answer) != PID.size:
                self.is_off = True
                return None
            return int(PID.unpack(answer)[0])

    def _start_server(self) -> None:
        self.line, theirs = socket.socketpair()
        code = _SERVER.format(tests=_TESTS)
        word, variable = room()
        environ = {k: v for k, v in os.environ.items() if k not in _FOLLOWED}
        with theirs:
            self.server = _ORIGINAL(
                [sys.executable, "-P", "-c", code, str(theirs.fileno()), word],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd="/",
                env={**environ, **variable, "OMP_NUM_THREADS": "1"},
            )
        self.on_start(self.server.pid)
        self.is_off = len(self.line.recv(PID.size, socket.MSG_WAITALL)) != PID.size


_client = _Client()


def use(line: socket.socket) -> None:
    """Start what this process starts through that line; called in a process that a server forked."""
    global _client
    line.recv(PID.size, socket.MSG_WAITALL)
    _client = _Client()
    _client.line = line
    subprocess.Popen = WarmPopen  # type: ignore[misc]


class WarmPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Starts what it can by a fork."""

    def _execute_child(self, args: Any, *more: Any) -> None:
        (
            executable, preexec_fn, close_fds, pass_fds, cwd, env, _, _, shell,
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
            _, gid, gids, uid, umask, start_new_session, process_group,
        ) = more  # fmt: skip
        unusual = (executable, preexec_fn, shell or None, gid, gids, uid)
        plain = all(option is None for option in unusual) and close_fds
        if plain and umask == -1 and process_group == -1 and not isinstance(args, str | bytes):
            order = plan([os.fspath(word) for word in args], env, cwd)
            pipes = (p2cread, c2pwrite, errwrite)
            standard = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
            if order is not None:
                order.new_session = start_new_session
                order.targets = [0, 1, 2, *pass_fds]
                pid = _client.start(order, [*standard, *pass_fds])
                if pid is not None:
                    self.pid = pid
                    self._child_created = True
                    self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
                    return
        super()._execute_child(args, *more)


def plan(words: list[str], env: Any, cwd: Any) -> Order | None:
    """The order for a command; ``None`` where it must start cold."""
    command = words
    folder = os.fspath(cwd) if cwd is not None else os.getcwd()
    namespaces: list[str] = []
    if words[0] == "nsenter" and "--" in words:
        end = words.index("--")
        namespaces = [word.partition("=")[2] for word in words[1:end]]
        if words[end + 1] != "env" or not words[end + 2].startswith("--chdir="):
            return None
        folder, words = words[end + 2].partition("=")[2], words[end + 3 :]
    elif not os.path.isdir(folder):
        return None
    own_mounts = words[:2] == ["unshare", "--mount"]
    if own_mounts:
        words = command = words[2:]
    if words[0] == _COMMAND:
        words = command = [sys.executable, *words]
    if words[0] != sys.executable or isinstance(words[-1], bytes):
        return None
    environment = dict(os.environ if env is None else env)
    if _how_python_starts(environment) != _SERVERS_WAY:
        return None
    rest = words[1:]
    flags = set()
    while rest and rest[0] in ("-P", "-u"):
        flags.add(rest.pop(0))
    if len(rest) > 1 and rest[0] in ("-m", "-c"):
        kind, target, *arguments = rest
    elif rest and (rest[0].endswith(".py") or rest[0] == _COMMAND):
        kind, (target, *arguments) = "script", rest
    else:
        return None
    return Order(
        command=words if namespaces else command,
        kind=kind,
        target=target,
        arguments=arguments,
        env=environment,
        cwd=os.path.abspath(folder),
        safe_path="-P" in flags,
        unbuffered="-u" in flags or bool(environment.get("PYTHONUNBUFFERED")),
        namespaces=namespaces,
        own_mounts=own_mounts,
    )


def _how_python_starts(environ: Any) -> dict[str, str]:
    return {k: v for k, v in environ.items() if k.startswith("PYTHON") and k not in _FOLLOWED}


def _take_orphans(on: bool) -> None:
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


_SERVERS_WAY = _how_python_starts(os.environ)


@contextlib.contextmanager
def installed(on_start: Callable[[int], None]) -> Iterator[None]:
    """Start warm from here on; ``on_start`` is told the process id of the server."""
    _client.on_start = on_start
    subprocess.Popen = WarmPopen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = _ORIGINAL  # type: ignore[misc]
        if _client.line is not None and _client.server is not None:
            _client.line.close()
            _client.server.wait()


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """Start as ever."""
    before, _client.is_off = _client.is_off, True
    try:
        yield
    finally:
        _client.is_off = before
