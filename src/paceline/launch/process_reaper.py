"""Making sure that nothing a launch started outlives it.

Each rank leads a process group of its own; what it starts in turn (loader workers, say) is in that
group. ``end_groups`` ends whatever is left of such groups. A launcher that is killed outright
cannot call it, so ``ProcessReaper`` starts this file as a small process of its own, which does
it instead. The file needs nothing but the standard library and starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

# How long leftovers get between the request to end and the kill.
PATIENCE_SECONDS = 1.0
_CHECK_SECONDS = 0.5


def running_members(groups: Iterable[int]) -> list[int]:
    """The living processes of these process groups; a dead one not yet reaped does not count."""
    groups = set(groups)
    if not groups:
        return []
    table = _linux_processes() if os.path.isdir("/proc/self") else _posix_processes()
    return [pid for pid, group, state in table if group in groups and state not in "ZX"]


def is_running(pid: int) -> bool:
    """Whether a process is alive; a dead one not yet reaped is not."""
    if os.path.isdir("/proc/self"):
        entry = _linux_process(str(pid))
        return entry is not None and entry[2] not in "ZX"
    return any(found == pid and state not in "ZX" for found, _, state in _posix_processes())


def signal_groups(groups: Iterable[int], signum: int) -> None:
    """Send a signal to every process of these groups."""
    for group in groups:
        # Gone in the meantime, or (macOS) only dead members left: nothing to signal.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signum)


def end_groups(groups: Iterable[int], patience: float = PATIENCE_SECONDS) -> None:
    """End what is left of these groups: ask, wait ``patience`` seconds, kill."""
    groups = list(groups)
    if not running_members(groups):
        return
    signal_groups(groups, signal.SIGTERM)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if not running_members(groups):
            return
        time.sleep(0.02)
    signal_groups(groups, signal.SIGKILL)


class ProcessReaper:
    """A process that ends the watched groups when this process is gone without having done so."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            # -I -S: neither the user's folder nor site-packages is looked at.
            [sys.executable, "-I", "-S", __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            # Out of reach of the terminal's Ctrl-C and hang-up.
            start_new_session=True,
        )

    def watch(self, groups: Iterable[int]) -> None:
        """End these process groups if this process dies."""
        self._send("+", groups)

    def forget(self, groups: Iterable[int]) -> None:
        """These groups are gone."""
        self._send("-", groups)

    def close(self) -> None:
        """End the reaper process; nothing is watched any more."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _send(self, sign: str, groups: Iterable[int]) -> None:
        assert self._process.stdin is not None
        # Someone killed the reaper: the launch goes on without its safety net.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("".join(f"{sign}{g}\n" for g in groups).encode())
            self._process.stdin.flush()


def _reap_after(launcher: int) -> None:
    """Read groups from stdin until the launcher closes it or dies; then end those left."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    watched: set[int] = set()
    pending = b""
    while True:
        # A fork of the launcher may hold the pipe open after its death: so look at the parent as
        # well. That comes before the read, so what a launcher sent just before its death is read.
        launcher_lives = os.getppid() == launcher
        if select.select([0], [], [], _CHECK_SECONDS if launcher_lives else 0)[0]:
            chunk = os.read(0, 65536)
        else:
            chunk = None
        if chunk:
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                (watched.add if line[:1] == b"+" else watched.discard)(int(line[1:]))
        elif chunk == b"" or not launcher_lives:
            break
    end_groups(watched)


def _linux_processes() -> list[tuple[int, int, str]]:
    found = (_linux_process(name) for name in os.listdir("/proc") if name.isdigit())
    return [entry for entry in found if entry is not None]


def _linux_process(pid: str) -> tuple[int, int, str] | None:
    """(pid, group, state) of a process, ``None`` when there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # "pid (name) state ppid group …"; the name may itself hold spaces and brackets.
            state, _, group, *_ = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(pid), int(group), state


def _posix_processes() -> list[tuple[int, int, str]]:
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,pgid=,stat="], capture_output=True, text=True, check=True
    ).stdout
    rows = (line.split() for line in listing.splitlines())
    return [(int(pid), int(group), state[0]) for pid, group, state in rows]


if __name__ == "__main__":
    _reap_after(int(sys.argv[1]))
