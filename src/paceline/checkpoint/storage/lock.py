"""One run at a time in a folder: taking the lock on it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import warnings
import weakref
from contextlib import suppress
from typing import ClassVar

from paceline.checkpoint.storage.local import LocalStorage
from paceline.checkpoint.storage.lock_holder import (
    BEAT_S,
    LOCK_FILE,
    FolderLock,
    identity,
    in_use,
    parse,
)
from paceline.checkpoint.storage.os_errors import explained
from paceline.checkpoint.storage.storage import Storage
from paceline.errors import CheckpointError

# Not where a link leads: what is written into a lock file must not land in another one.
_OPEN_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


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
        self.path = storage.root / LOCK_FILE
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
        """See ``FolderLock.check``."""
        if self._handle < 0 or not self._is_at_its_path():
            raise CheckpointError(
                f"the lock {self.path} of this run is gone: was its folder removed or replaced, or "
                "is the disk no longer mounted? Nothing more is written there."
            )

    def release(self) -> None:
        """See ``FolderLock.release``."""
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
