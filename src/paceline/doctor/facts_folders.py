"""Gathering how the folders of a run behave: writable, how fast, and seen by which machines."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint.storage.open import open_storage
from paceline.checkpoint.storage.storage import Storage
from paceline.doctor.facts import SYNC_BYTES, FolderFacts, FolderSighting
from paceline.errors import PacelineError

_PATIENCE_S = 5.0  # network file systems show a new file a moment later
_POLL_S = 0.1
_MADE = ".paceline-doctor-made"


@dataclass(frozen=True)
class Wanted:
    """A folder that the config names. ``where`` is an absolute path or a URL."""

    key: str
    where: str
    is_url: bool
    holds_checkpoints: bool
    options: dict[str, Any] = field(default_factory=dict)


class Tokens:
    """Small files, one by each machine, that tell whether a folder is one and the same.

    Folders that do not exist are made, as the run would, with a mark in them: whichever machine is
    the last to leave removes them.
    """

    def __init__(self, wanted: Sequence[Wanted], token: str) -> None:
        self.wanted = wanted
        self.token = token
        self._written: list[tuple[Storage, str]] = []

    def write(self, machine: str) -> tuple[FolderFacts, ...]:
        """Write this machine's file everywhere, and say how that went."""
        return tuple(self._write(one, machine) for one in self.wanted)

    def read(self, reader: str, writers: Sequence[str]) -> list[FolderSighting]:
        """Look for the files of ``writers``, with patience."""
        deadline = time.monotonic() + _PATIENCE_S
        found = []
        for one in self.wanted:
            for writer in writers:
                ok, error = self._find(one, writer, deadline)
                found.append(FolderSighting(one.key, writer, reader, ok, error))
        return found

    def clean_up(self) -> None:
        """Remove this machine's files."""
        for storage, name in self._written:
            with suppress(PacelineError):
                storage.delete(name)
        self._written.clear()

    def remove_folders(self) -> None:
        """Remove folders that the doctor made on any machine, where no other one uses them."""
        for one in self.wanted:
            path = Path(one.where)
            while not one.is_url:
                try:
                    if os.listdir(path) != [_MADE]:
                        break
                    (path / _MADE).unlink()
                    path.rmdir()
                except OSError:  # another machine was quicker
                    break
                path = path.parent

    def _write(self, one: Wanted, machine: str) -> FolderFacts:
        name, free, sync = self._name(machine), None, None
        try:
            storage = self._open(one)
            begin = time.monotonic()
            self._written.append((storage, name))
            if one.is_url:
                storage.replace(name, self.token.encode())
            else:
                # As checkpoints are written: the bytes, then the certainty that they are there.
                storage.create(name, [memoryview(self.token.encode().ljust(SYNC_BYTES, b"."))])
                sync = time.monotonic() - begin
                space = os.statvfs(one.where)
                free = space.f_frsize * space.f_bavail
            error = ""
        except (PacelineError, OSError) as problem:
            error = str(problem)
        return FolderFacts(one.key, one.where, one.is_url, one.holds_checkpoints, error, free, sync)

    def _find(self, one: Wanted, writer: str, deadline: float) -> tuple[bool, str]:
        while True:
            try:
                storage = open_storage(one.where, one.options)
                if storage.size(self._name(writer)) is not None:
                    return True, ""
                error = ""
            except (PacelineError, OSError) as problem:
                error = str(problem)
            if time.monotonic() > deadline:
                return False, error
            time.sleep(_POLL_S)

    def _open(self, one: Wanted) -> Storage:
        storage = open_storage(one.where, one.options)
        if one.is_url:
            storage.make_folder()
        else:
            self._make(Path(one.where))
        return storage

    def _make(self, path: Path) -> None:
        missing = []
        while not path.exists():
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            # It appears with its mark in it, so that no machine ever sees it without.
            fresh = folder.with_name(f".paceline-doctor-{uuid.uuid4().hex}")
            try:
                fresh.mkdir()
                (fresh / _MADE).touch()
            except OSError as error:
                error.filename = str(folder)
                raise
            try:
                fresh.rename(folder)
            except OSError:  # another machine was quicker
                (fresh / _MADE).unlink()
                fresh.rmdir()

    def _name(self, machine: str) -> str:
        safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in machine)
        return f".paceline-doctor-{self.token}-{safe}"
