"""A storage of files that this process holds open, whatever happens to their names."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from paceline.checkpoint.hashing import XXH3, Digest
from paceline.checkpoint.memory.private_files import open_private
from paceline.checkpoint.storage.os_errors import explained
from paceline.checkpoint.storage.storage import ReadableFile, Storage
from paceline.errors import CheckpointError


class OpenFiles(Storage):
    """Read only: some files, each under a path of our choosing, of which so many bytes count."""

    def __init__(self, where: str, digest: Digest = XXH3) -> None:
        self.where = where
        self.digest = digest
        self._files: dict[str, _OpenFile | _HeldBytes] = {}

    def add(self, path: str, real: Path, size: int) -> None:
        """Open the file ``real``, of which ``size`` bytes count, as ``path``."""
        self.drop(path)
        self._files[path] = _OpenFile(str(real), open_private(real), size)

    def add_bytes(self, path: str, data: bytes) -> None:
        """Have ``data`` as ``path``."""
        self._files[path] = _HeldBytes(data)

    def drop(self, path: str) -> None:
        """Let go of one file."""
        if path in self._files:
            self._files.pop(path).let_go()

    def close(self) -> None:
        """Let go of all files."""
        for path in list(self._files):
            self.drop(path)

    def names(self, folder: str = "") -> list[str]:
        """See ``Storage.names``."""
        inside = f"{folder}/" if folder else ""
        paths = (path.removeprefix(inside) for path in self._files if path.startswith(inside))
        return sorted({path.partition("/")[0] for path in paths})

    def size(self, path: str) -> int | None:
        """See ``Storage.size``."""
        if path not in self._files:
            return None
        return self._files[path].there()

    def open_read(self, path: str) -> ReadableFile:
        """See ``Storage.open_read``."""
        if path not in self._files:
            raise CheckpointError(f"{self.full(path)} is not in the memory of this node.")
        return self._files[path]

    def create(self, path: str, chunks: Iterable[memoryview]) -> None:
        """Refused."""
        raise self._refusal(path)

    def put_new(self, path: str, data: bytes) -> bool:
        """Refused."""
        raise self._refusal(path)

    def replace(self, path: str, data: bytes) -> None:
        """Refused."""
        raise self._refusal(path)

    def move(self, path: str, to: str) -> None:
        """Refused."""
        raise self._refusal(path)

    def delete(self, path: str) -> None:
        """Refused."""
        raise self._refusal(path)

    def delete_folder(self, path: str) -> None:
        """Refused."""
        raise self._refusal(path)

    def make_folder(self, path: str = "") -> None:
        """Refused."""
        raise self._refusal(path)

    def _refusal(self, path: str) -> CheckpointError:
        return CheckpointError(f"{self.full(path)} is a snapshot in memory: it can only be read.")


class _OpenFile(ReadableFile):
    """A file of which the first ``size`` bytes count."""

    def __init__(self, path: str, handle: int, size: int) -> None:
        self.path = path
        self.size = size
        self._handle = handle

    def there(self) -> int:
        return min(self.size, os.fstat(self._handle).st_size)

    def read_into(self, offset: int, into: memoryview) -> int:
        into = into[: max(self.size - offset, 0)]
        done = 0
        with explained("read", self.path):
            while done < len(into):
                got = os.preadv(self._handle, [into[done:]], offset + done)
                if got == 0:
                    break
                done += got
        return done

    def close(self) -> None:
        """Nothing: it stays open for who reads next."""

    def let_go(self) -> None:
        os.close(self._handle)


class _HeldBytes(ReadableFile):
    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self._data = data

    def there(self) -> int:
        return self.size

    def read_into(self, offset: int, into: memoryview) -> int:
        found = self._data[offset : offset + len(into)]
        into[: len(found)] = found
        return len(found)

    def close(self) -> None:
        """Nothing: it stays for who reads next."""

    def let_go(self) -> None:
        """Nothing to give back."""
