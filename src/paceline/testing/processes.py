"""Questions on processes and sockets, answered from ``/proc``; elsewhere they find nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path

_PROC = Path("/proc")


def children() -> dict[int, str]:
    """Live child processes of this one, by id, with their command lines."""
    return {pid: command_line(pid) for pid, parent in parents().items() if parent == os.getpid()}


def parents() -> dict[int, int]:
    """The parent of every live process."""
    found = {}
    for entry in _PROC.glob("[0-9]*/stat"):
        try:
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # gone in the meantime
            continue
        if state not in "ZX":
            found[int(entry.parent.name)] = int(parent)
    return found


def descendants(root: int, tree: dict[int, int]) -> set[int]:
    """The live processes below ``root``, by the parents in ``tree``."""
    found: set[int] = set()
    wave = {root}
    while wave:
        wave = {pid for pid, parent in tree.items() if parent in wave}
        found |= wave
    return found


def is_alive(pid: int) -> bool:
    """Whether the process exists and has not ended (a zombie has)."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def command_line(pid: int) -> str:
    """The command line of a process, or ``?``."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return "?"
    return b" ".join(words).decode(errors="replace")[:120] or "?"


def started_with(variable: str, value: str) -> set[int]:
    """The live processes that were started with ``value`` in the environment's ``variable``."""
    name, wanted = f"{variable}=".encode(), value.encode()
    found = set()
    for pid in parents():
        try:
            environ = (_PROC / str(pid) / "environ").read_bytes()
        except OSError:  # gone, or another user's
            continue
        if any(entry.startswith(name) and wanted in entry for entry in environ.split(b"\0")):
            found.add(pid)
    return found


def listening_ports() -> dict[str, int]:
    """The TCP ports this process listens on, by socket."""
    listening = {}
    for name in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "self" / "net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == "0A":
                listening[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    own = set()
    for descriptor in _PROC.glob("self/fd/*"):
        try:
            link = os.readlink(descriptor)
        except OSError:
            continue
        if match := re.fullmatch(r"socket:\[(\d+)\]", link):
            own.add(match[1])
    return {socket: port for socket, port in listening.items() if socket in own}
