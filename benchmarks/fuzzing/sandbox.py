"""One case in a process of its own: shut in, limited, timed, and its surroundings looked at."""

from __future__ import annotations

import contextlib
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

from fuzzing.isolation import drop_rights, leave_the_machine, shut_in

CANARY = 2
"""The process that must get no signal: the second of its namespace. The first notes them, too."""
_MEMORY = 2 << 30
_FILE = 256 << 20
# What moves a terminal: control characters but line end and tab, and their eight-bit forms.
_CONTROLS = {*map(chr, range(32)), *map(chr, range(127, 160))} - {"\n", "\t"}

Prepared = tuple[list[str], Callable[[], Any], list[str]]
"""The command in words, what is called, and what was done to its input."""


@dataclass
class Outcome:
    """What came of a case. ``wrong`` is empty where all is well."""

    status: int | None = None
    seconds: float = 0.0
    wrong: dict[str, str] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


def run_case(
    prepare: Callable[[Path], Prepared], folder: Path, name: str, outside: Path, limit: float
) -> Outcome:
    """Let a child make its case in ``folder/name`` and run it; look at what it left.

    Nothing but ``folder`` can be written by it, and in there ``outside`` must stay as it is.
    """
    box = folder / name
    box.mkdir()
    before = _state_of(outside)
    read, write = os.pipe()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _guard(prepare, folder, box, write)
    os.close(write)
    outcome = Outcome()
    ended = _wait(pid, limit)
    outcome.seconds = time.monotonic() - started
    with os.fdopen(read, "rb") as pipe:
        for part in _messages(pipe.read()):
            _take(outcome, part)
    if not ended:
        outcome.wrong["hang"] = f"more than {limit:g} s"
    elif outcome.status is None and not outcome.wrong:
        outcome.wrong["killed"] = "it ended without a word"
    if _state_of(outside) != before:
        outcome.wrong["outside"] = "files outside of the run were touched"
    for stream in ("stdout", "stderr"):
        with contextlib.suppress(OSError):
            text = (box / stream).read_text(encoding="utf-8", errors="surrogateescape")
            if found := _CONTROLS & {*text}:
                outcome.wrong["escapes"] = f"{sorted(found)!r} on {stream}"
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


def _wait(pid: int, limit: float) -> bool:
    """Whether a child ended by itself; it is ended, and all that it started with it."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def _guard(prepare: Any, folder: Path, box: Path, write: int) -> None:
    """The child: makes the namespaces, and waits for the first process in them."""
    try:
        leave_the_machine()
        first = os.fork()
        if first == 0:
            _first(prepare, folder, box, write)
        os.waitpid(first, 0)
        os._exit(0)
    except BaseException as error:
        _tell(write, "traceback", _told(error))
        os._exit(1)


def _first(prepare: Any, folder: Path, box: Path, write: int) -> None:
    """Process 1: shuts itself in, starts the canary and the case; all ends with it."""
    try:
        shut_in(folder)
        _note_signals(write)
        lives, ends = os.pipe()
        canary = os.fork()
        if canary == 0:
            os.close(ends)
            _note_signals(write)
            os.read(lives, 1)
            os._exit(0)
        assert canary == CANARY, canary
        case = os.fork()
        if case == 0:
            os.close(ends)
            _case(prepare, box, write)
        os.waitpid(case, 0)
        os.close(ends)
        # It ends now, and has noted by then what came to it.
        if os.waitpid(canary, 0)[1] != 0:
            _tell(write, "signalled", "the other process was ended")
        os._exit(0)
    except BaseException as error:
        _tell(write, "traceback", _told(error))
        os._exit(1)


def _note_signals(write: int) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, lambda n, _: _tell(write, "signalled", signal.Signals(n).name))


def _case(prepare: Any, box: Path, write: int) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        os.setsid()
        os.chdir(box)
        os.environ["HOME"] = str(box)
        command, call, done = prepare(box)
        _tell(write, "command", command)
        _tell(write, "done", done)
        _limit(box)
        threading.excepthook = lambda args: _tell(write, "thread", _told(args.exc_value))
        try:
            call()
            status: int | None = 0
        except SystemExit as ending:
            status = ending.code if isinstance(ending.code, int) else 1
        _tell(write, "status", status)
    except BaseException as error:
        _tell(write, "traceback", _told(error))
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)


def _tell(write: int, name: str, value: Any) -> None:
    os.write(write, pickle.dumps((name, value)))


def _told(error: BaseException | None) -> str:
    return "".join(traceback.format_exception(error))[-3000:]


def _limit(box: Path) -> None:
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
    drop_rights()


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
