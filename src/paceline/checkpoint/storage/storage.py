"""Where checkpoints are kept: a few verbs that a local folder and an object store both have.

Paths are relative to the storage's root, with ``/`` between their parts. Whatever the system
refuses becomes a ``StorageError`` that names the path, the cause and what to do.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from paceline.checkpoint.hashing import XXH3, Digest
from paceline.errors import StorageError
from paceline.untrusted import MIB

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
"""The names of files that ``Storage.replace`` had not finished when its process died."""

_MOST_AT_ONCE = 256 * MIB


class ReadableFile(ABC):
    """A file opened for reading; closes itself at the end of a ``with`` block."""

    size: int

    @abstractmethod
    def read_into(self, offset: int, into: memoryview) -> int:
        """Fill ``into`` with the bytes from ``offset`` on; how many there were before the end."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""

    def __enter__(self) -> ReadableFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ScatteringFile(ReadableFile):
    """One that several threads may read at once, each straight to where its bytes belong."""

    @abstractmethod
    def read_scattered(self, offset: int, into: Sequence[memoryview]) -> int:
        """Fill one after the other with the bytes from ``offset`` on; how many there were."""


class Storage(ABC):
    """A place for files; ``where`` says which. Made by ``open_storage``."""

    where: str
    read_span: int = 4 * 1024 * 1024
    """How many bytes one read should ask for."""
    digest: Digest = XXH3
    """How checkpoints are hashed that are written here; its key, if any, is required to read."""

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """What lies in ``folder``, sorted, one level deep; nothing where there is no folder."""

    @abstractmethod
    def size(self, path: str) -> int | None:
        """The size of a file; ``None`` where there is none."""

    @abstractmethod
    def open_read(self, path: str) -> ReadableFile:
        """Open a file."""

    @abstractmethod
    def create(self, path: str, chunks: Iterable[memoryview]) -> None:
        """Write a new file, safe from a power cut when this returns. Its folder must exist.

        Where it fails, nothing is left under this name if that can be helped.
        """

    @abstractmethod
    def replace(self, path: str, data: bytes) -> None:
        """Write a file, new or not: at every instant it holds all of the old or all of the new."""

    @abstractmethod
    def put_new(self, path: str, data: bytes) -> bool:
        """Write a small file unless there is one of that name; whether it was written."""

    @abstractmethod
    def move(self, path: str, to: str) -> None:
        """Give a file another name, in a folder that exists; what had that name is replaced."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file; one that is gone already is fine."""

    @abstractmethod
    def delete_folder(self, path: str) -> None:
        """Delete a folder and all that is in it; one that is gone already is fine."""

    @abstractmethod
    def make_folder(self, path: str = "") -> None:
        """Make a folder, and those above it; one that is there already is fine."""

    def read_bytes(self, path: str) -> bytes:
        """All bytes of a (small) file."""
        with self.open_read(path) as file:
            if file.size > _MOST_AT_ONCE:
                raise StorageError(
                    f"cannot read {self.full(path)}: it has {file.size} bytes, and a file of its "
                    f"kind has at most {_MOST_AT_ONCE}."
                )
            data = bytearray(file.size)
            found = file.read_into(0, memoryview(data))
        return bytes(data[:found])

    def sizes(self, paths: Sequence[str]) -> list[int | None]:
        """The size of each, as ``size`` gives it."""
        return [self.size(path) for path in paths]

    def full(self, path: str) -> str:
        """``path`` as a person would write it, from the root of everything."""
        return f"{self.where.rstrip('/')}/{path}" if path else self.where
