"""Questions on processes and sockets, answered from ``/proc``; elsewhere they find nothing."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

_PROC = Path("/proc")
_OWN_FILES = _PROC / "self" / "fd"
_SECONDS_TO_START = 0.2
_KERNEL_THREAD = 0x200000  # PF_KTHREAD, a flag in /proc/PID/stat


def pids() -> set[int]:
    """Every process there is."""
    return {int(name) for name in os.listdir(_PROC) if name.isdigit()} if _PROC.is_dir() else set()


def children() -> dict[int, str]:
    """Live child processes of this one, by id, with their command lines."""
    found: list[int] = []
    for listing in _PROC.glob("self/task/*/children"):
        try:
            found += map(int, listing.read_text().split())
        except OSError:  # the thread has ended
            continue
    return {pid: command_line(pid) for pid in found if is_alive(pid)}


def ancestors(pid: int) -> list[int]:
    """The parent of a process, its parent, and so on."""
    found = []
    while (stat := _stat(pid)) is not None and (pid := int(stat[1])) > 0:
        found.append(pid)
    return found


def is_alive(pid: int) -> bool:
    """Whether the process exists and has not ended (a zombie has)."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX"


def command_line(pid: int) -> str:
    """The command line of a process, or ``?``."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return "?"
    return b" ".join(words).decode(errors="replace")[:120] or "?"


def was_started_with(pid: int, variable: str, value: str) -> bool:
    """Whether a process was started with ``value`` in the environment's ``variable``."""
    deadline = time.monotonic() + _SECONDS_TO_START
    # While a process starts its program the kernel shows an empty environment: look again then.
    while not (environ := _environ(pid)):
        if not _may_be_starting(pid) or time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    name, wanted = f"{variable}=".encode(), value.encode()
    return any(entry.startswith(name) and wanted in entry for entry in environ.split(b"\0"))


def _may_be_starting(pid: int) -> bool:
    """Whether it lives and is a program: the kernel's own threads never have an environment."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX" and not int(stat[6]) & _KERNEL_THREAD


def _environ(pid: int) -> bytes:
    try:
        return (_PROC / str(pid) / "environ").read_bytes()
    except OSError:  # gone, or another user's
        return b""


def listening_ports() -> dict[str, int]:
    """The TCP ports this process listens on, by socket.

    Each socket is asked itself: the kernel's table of connections is long on a busy machine, and
    takes milliseconds to read.
    """
    found = {}
    for descriptor in os.listdir(_OWN_FILES) if _OWN_FILES.is_dir() else []:
        try:
            name = os.readlink(_OWN_FILES / descriptor)
            port = _listens_on(int(descriptor)) if name.startswith("socket:") else None
        except OSError:  # closed meanwhile
            continue
        if port is not None:
            found[name] = port
    return found


def _listens_on(descriptor: int) -> int | None:
    """The TCP port that a socket of this process listens on."""
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6)
        if is_tcp and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return int(copy.getsockname()[1])
    return None


def _stat(pid: int) -> list[str] | None:
    """State, parent and the rest of what the kernel says of a process; ``None`` when it is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()
