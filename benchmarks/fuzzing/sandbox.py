"""One case in a process of its own: forked, limited, timed, and its surroundings looked at."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import os
import pickle
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MEMORY = 2 << 30
_FILE = 256 << 20
# What moves a terminal: control characters but line end and tab, and their eight-bit forms.
_CONTROLS = {*map(chr, range(32)), *map(chr, range(127, 160))} - {"\n", "\t"}


@dataclass
class Outcome:
    """What came of a case. ``wrong`` is empty where all is well."""

    status: int | None = None
    seconds: float = 0.0
    wrong: dict[str, str] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Surroundings:
    """What a case must leave alone: files ``outside``, and the process ``canary``."""

    outside: Path
    canary: int


def run_case(
    prepare: Callable[[Path], tuple[list[str], Callable[[], Any], list[str]]],
    box: Path,
    around: Surroundings,
    limit: float,
) -> Outcome:
    """Fork, let the child make its case in ``box`` and run it, look at what it left."""
    box.mkdir(mode=0o755)
    before = _state_of(around.outside)
    read, write = os.pipe()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _child(prepare, box, write)
    os.close(write)
    outcome = Outcome()
    status = _wait(pid, limit)
    outcome.seconds = time.monotonic() - started
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read()
    if told:
        for part in _messages(told):
            _take(outcome, part)
    if status is None:
        outcome.wrong["hang"] = f"more than {limit:g} s"
    elif os.WIFSIGNALED(status):
        outcome.wrong["killed"] = signal.Signals(os.WTERMSIG(status)).name
    if _state_of(around.outside) != before:
        outcome.wrong["outside"] = "files outside of the run were touched"
    for name in ("stdout", "stderr"):
        with contextlib.suppress(OSError):
            text = (box / name).read_text(encoding="utf-8", errors="surrogateescape")
            if found := _CONTROLS & {*text}:
                outcome.wrong["escapes"] = f"{sorted(found)!r} on {name}"
    _remove(box)
    return outcome


def _messages(told: bytes) -> list[tuple[str, Any]]:
    file, found = io.BytesIO(told), []
    while True:
        try:
            found.append(pickle.load(file))
        except (EOFError, pickle.UnpicklingError):
            return found


def _take(outcome: Outcome, part: tuple[str, Any]) -> None:
    name, value = part
    if name in ("done", "command", "status"):
        setattr(outcome, name, value)
    else:
        outcome.wrong[name] = value


def _wait(pid: int, limit: float) -> int | None:
    """The status of a child; ``None`` where it had to be ended."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _child(prepare: Any, box: Path, write: int) -> None:
    """In the child: never returns."""

    def tell(name: str, value: Any) -> None:
        os.write(write, pickle.dumps((name, value)))

    code = 0
    try:
        os.setsid()
        os.chdir(box)
        os.environ["HOME"] = str(box)
        command, call, done = prepare(box)
        tell("command", command)
        tell("done", done)
        _limits(box)
        threading.excepthook = lambda args: tell("thread", _told(args.exc_value))
        try:
            call()
            status: int | None = 0
        except SystemExit as ending:
            status = ending.code if isinstance(ending.code, int) else 1
        tell("status", status)
    except BaseException as error:
        tell("traceback", _told(error))
        code = 99
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _told(error: BaseException | None) -> str:
    lines = traceback.format_exception(error)
    return "".join(lines)[-3000:]


def _limits(box: Path) -> None:
    """A common user's rights, so much memory more than now, output into files."""
    for name, stream in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(box / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), stream)
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stderr = os.fdopen(os.dup(2), "w", encoding="utf-8")
    sys.stdin = open(os.devnull)  # noqa: SIM115 (for as long as the process lives)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE, _FILE))
    _drop_capabilities()


def _drop_capabilities() -> None:
    """So that a file without rights cannot be read by root either."""
    libc = ctypes.CDLL(None, use_errno=True)
    version_3 = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if libc.capset(version_3, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _state_of(folder: Path) -> str:
    """All that can be seen of a folder: names, kinds, sizes, times, contents."""
    seen = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found = path.lstat()
        seen.update(f"{path} {found.st_mode} {found.st_size} {found.st_mtime_ns}\n".encode())
        if path.is_file() and not path.is_symlink():
            seen.update(path.read_bytes())
    return seen.hexdigest()


def _remove(box: Path) -> None:
    shutil.rmtree(box, ignore_errors=True)
    if box.exists():
        for root, _, _ in os.walk(box):
            os.chmod(root, 0o700)
        shutil.rmtree(box)


class Canary:
    """A process that must get no signal; it writes down every one that it gets."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "signals"
        self._log.write_bytes(b"")
        self.pid = os.fork()
        if self.pid == 0:
            self._live()

    def signals(self) -> list[str]:
        """The names of those it got, and that it died where it did."""
        died = os.waitpid(self.pid, os.WNOHANG)[0] != 0
        numbers = [signal.Signals(number).name for number in self._log.read_bytes()]
        return numbers + ["it was ended"] * died

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def _live(self) -> None:
        parent = os.getppid()
        log = os.open(self._log, os.O_WRONLY | os.O_APPEND)
        os.setsid()
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, lambda n, _: os.write(log, bytes([n])))
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)
