"""The lock on a folder in an object store, which knows no locks: an object with a heartbeat."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from contextlib import suppress
from typing import Any

from paceline.checkpoint.storage.lock_holder import (
    BEAT_S,
    LOCK_FILE,
    FolderLock,
    holder_text,
    identity,
    in_use,
    is_dead,
    parse,
)
from paceline.checkpoint.storage.storage import Storage
from paceline.errors import CheckpointError, StorageError

_PATIENCE = 3  # beats that a holder may miss before it is taken for dead


class RemoteLock(FolderLock):
    """An object that its holder rewrites every ``beat_s`` seconds, with a counter that goes up.

    A counter that stands still for three beats, or a dead process of this machine, is a holder
    that is no more: its lock is taken over. Clocks of different machines are never compared.
    """

    def __init__(self, storage: Storage, owner: str, beat_s: float = BEAT_S) -> None:
        self.storage = storage
        self._beat_s = beat_s
        self._me = {**identity(owner), "token": secrets.token_hex(8), "beat": 0, "every": beat_s}
        self._process = os.getpid()
        self._lost: str | None = None
        self._ended = threading.Event()
        self._turn = threading.Lock()
        if not storage.put_new(LOCK_FILE, self._text()):
            self._outwait()
            storage.replace(LOCK_FILE, self._text())
            time.sleep(min(1.0, beat_s / 4))  # another may have waited just as long
        if not self._is_mine(holder := self._read()):
            raise CheckpointError(in_use(storage.where, holder))
        self._thread = threading.Thread(target=self._beat, name="paceline-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """See ``FolderLock.check``. Looks anew: this process may have slept for long."""
        if not self._lost and not self._ended.is_set():
            with self._turn:
                self._look()
        if self._lost or self._ended.is_set():
            raise CheckpointError(
                f"this run no longer holds the lock on {self.storage.where}: "
                f"{self._lost or 'it was released'}. Nothing more is written there."
            )

    def release(self) -> None:
        """See ``FolderLock.release``."""
        if self._ended.is_set() or os.getpid() != self._process:
            return
        self._ended.set()
        self._thread.join()
        with suppress(StorageError):  # then it goes stale, and the next run takes it over
            if self._is_mine(self._read()):
                self.storage.delete(LOCK_FILE)

    def _outwait(self) -> None:
        """Return when the holder turns out to be gone; raise when it is alive."""
        first = self._read()
        if first is None or is_dead(first):
            return
        every = max(self._beat_s, float(first.get("every", 0.0)))
        deadline = time.monotonic() + _PATIENCE * every
        while time.monotonic() < deadline:
            time.sleep(min(every / 4, max(deadline - time.monotonic(), 0.01)))
            now = self._read()
            if now is None:
                return
            if (now.get("token"), now.get("beat")) != (first.get("token"), first.get("beat")):
                raise CheckpointError(in_use(self.storage.where, now))

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_s):
            # The network may come back before anyone takes over.
            with self._turn, suppress(StorageError):
                self._look()
                if self._lost:
                    return
                self._me["beat"] += 1
                self.storage.replace(LOCK_FILE, self._text())

    def _look(self) -> None:
        """Note whether it was taken over; in turns, so that a half-written one is never read."""
        if not self._is_mine(holder := self._read()):
            self._lost = holder_text(holder) if holder else f"{LOCK_FILE} was deleted"

    def _text(self) -> bytes:
        return json.dumps(self._me).encode()

    def _read(self) -> dict[str, Any] | None:
        if self.storage.size(LOCK_FILE) is None:
            return None
        return parse(self.storage.read_bytes(LOCK_FILE))

    def _is_mine(self, holder: dict[str, Any] | None) -> bool:
        return holder is not None and holder.get("token") == self._me["token"]
