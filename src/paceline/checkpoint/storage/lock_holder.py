"""Who holds the lock on a folder: what a lock file says, and whether that process still lives."""

from __future__ import annotations

import os
import socket
import time
from abc import ABC, abstractmethod
from typing import Any

from paceline.untrusted import parse_json

LOCK_FILE = ".lock"
BEAT_S = 10.0


class FolderLock(ABC):
    """Held from when it is made until it is released, or its process ends."""

    @abstractmethod
    def check(self) -> None:
        """Raise ``CheckpointError`` if it is not held any more."""

    @abstractmethod
    def release(self) -> None:
        """Let others in; releasing twice is fine."""

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def identity(owner: str) -> dict[str, Any]:
    """Who holds it: for people, and for telling whether that process still lives."""
    return {
        "owner": owner,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": _machine(),
        "started": _start_of(os.getpid()),
    }


def parse(data: bytes) -> dict[str, Any]:
    """What a lock file says; nothing where it cannot be understood."""
    try:
        found = parse_json(data)
    except ValueError:
        return {}  # read while it was being written
    return found if isinstance(found, dict) else {}


def in_use(where: str, holder: dict[str, Any] | None) -> str:
    """Why a second run is refused."""
    return (
        f"{where} is in use by another run: {holder_text(holder or {})}. Two runs in one folder "
        "would delete each other's checkpoints. Wait for it to end, stop it, or choose another "
        "run_dir."
    )


def holder_text(holder: dict[str, Any]) -> str:
    """The holder for people to read."""
    if not holder:
        return "one that has not said who it is"
    return (
        f"{holder.get('owner')} (process {holder.get('pid')} on {holder.get('host')}, since "
        f"{holder.get('since')})"
    )


def _machine() -> str:
    """A name for this machine since it started, and for the space its process ids are from.

    Two containers may share a host name, and each have a process 1.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _start_of(pid: int) -> str | None:
    """When a process started, in ticks; ``None`` if it is not alive, or the system cannot say."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def is_dead(holder: dict[str, Any]) -> bool:
    """Whether the process that wrote this is known to be gone."""
    if holder.get("machine") != _machine() or not os.path.isdir("/proc/self"):
        return False
    pid, started = holder.get("pid"), holder.get("started")
    return isinstance(pid, int) and started is not None and _start_of(pid) != started
