"""One run at a time in a folder: the lock that a run holds, and what it says of its holder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, ClassVar

from paceline.checkpoint.storage.local import LocalStorage, Storage, explained
from paceline.errors import CheckpointError
from paceline.untrusted import parse_json

NAME = ".lock"
BEAT_S = 10.0
# Not where a link leads: what is written into a lock file must not land in another one.
_OPEN_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


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


def take(storage: Storage, owner: str, beat_s: float = BEAT_S) -> FolderLock:
    """Lock the root of ``storage`` for ``owner`` (a few words for people).

    Raises ``CheckpointError`` that names the holder where another run has it.
    """
    storage.make_folder()
    if isinstance(storage, LocalStorage):
        return LocalLock(storage, owner)
    from paceline.checkpoint.storage.remote_lock import RemoteLock  # fsspec only where it is needed

    return RemoteLock(storage, owner, beat_s)


class LocalLock(FolderLock):
    """``flock`` on a file: the system lets go of it when the process ends, however it ends."""

    _held: ClassVar[weakref.WeakSet[LocalLock]] = weakref.WeakSet()

    def __init__(self, storage: LocalStorage, owner: str) -> None:
        self.path = storage.root / NAME
        self._handle = -1
        with explained("lock", storage.where):
            while True:
                self._handle = os.open(self.path, _OPEN_LOCK, 0o644)
                self._flock(storage.where)
                if self._is_at_its_path():
                    break
                self._close()  # its holder was just deleting it: there may be a new one by now
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, json.dumps(identity(owner)).encode(), 0)
        LocalLock._held.add(self)

    def check(self) -> None:
        """See :meth:`FolderLock.check`."""
        if self._handle < 0 or not self._is_at_its_path():
            raise CheckpointError(
                f"the lock {self.path} of this run is gone: was its folder removed or replaced, or "
                "is the disk no longer mounted? Nothing more is written there."
            )

    def release(self) -> None:
        """See :meth:`FolderLock.release`."""
        if self._handle >= 0:
            if self._is_at_its_path():
                with suppress(OSError):  # a file without a lock on it is in nobody's way
                    self.path.unlink()
            self._close()
            LocalLock._held.discard(self)

    def _flock(self, where: str) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = parse(os.pread(self._handle, 4096, 0))
            self._close()
            raise CheckpointError(in_use(where, holder)) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self._close()
                raise
            warnings.warn(
                f"the file system of {where} knows no locks ({os.strerror(error.errno or 0)}): "
                "make sure that no second run works in this folder.",
                stacklevel=5,
            )

    def _is_at_its_path(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._handle))
        except OSError:
            return False

    def _close(self) -> None:
        os.close(self._handle)
        self._handle = -1

    @staticmethod
    def forget_in_child() -> None:
        """A forked child (a worker of a data loader) must not hold on to its parent's lock."""
        for lock in list(LocalLock._held):
            lock._close()
        LocalLock._held.clear()


os.register_at_fork(after_in_child=LocalLock.forget_in_child)


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
