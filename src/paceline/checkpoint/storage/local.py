"""Where checkpoints are kept: a few verbs that a local folder and an object store both have.

Paths are relative to the storage's root, with ``/`` between their parts. Whatever the system
refuses becomes a :class:`StorageError` that names the path, the cause and what to do.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.checkpoint.digests import XXH3, Digest
from paceline.checkpoint.storage.os_errors import explained as explained
from paceline.errors import CheckpointError, StorageError
from paceline.untrusted import MIB, NotReadable, open_descriptor

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
"""The names of files that :meth:`Storage.replace` had not finished when its process died."""

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:(:|//)")
_BUFFER = MIB
_MOST_AT_ONCE = 256 * MIB
_MOST_VIEWS = os.sysconf("SC_IOV_MAX")


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
    """A place for files; ``where`` says which. Made by :func:`open_storage`."""

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
        """The size of each, as :meth:`size` tells it."""
        return [self.size(path) for path in paths]

    def full(self, path: str) -> str:
        """``path`` as a person would write it, from the root of everything."""
        return f"{self.where.rstrip('/')}/{path}" if path else self.where


class LocalStorage(Storage):
    """A folder of this machine, or one mounted on it."""

    def __init__(self, where: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(os.fspath(where)))
        self.where = str(self.root)

    def names(self, folder: str = "") -> list[str]:
        """See :meth:`Storage.names`."""
        with self._explained("list", folder):
            try:
                return sorted(os.listdir(self.root / folder))
            except FileNotFoundError:
                return []

    def size(self, path: str) -> int | None:
        """See :meth:`Storage.size`."""
        with self._explained("look at", path):
            try:
                found = os.stat(self.root / path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None  # reading a pipe would hang

    def open_read(self, path: str) -> ReadableFile:
        """See :meth:`Storage.open_read`."""
        with self._explained("read", path):
            return _LocalFile(self, path)

    def create(self, path: str, chunks: Iterable[memoryview]) -> None:
        """See :meth:`Storage.create`. A file that is there already is refused."""
        full = self.root / path
        with self._explained("write", path):
            # The buffer gathers small chunks; larger ones pass it by.
            with open(full, "xb", buffering=_BUFFER) as file, _deleted_on_failure(full):
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            _fsync_folder(full.parent)

    def replace(self, path: str, data: bytes) -> None:
        """See :meth:`Storage.replace`."""
        full = self.root / path
        temporary = full.with_name(f".{full.name}.{secrets.token_hex(4)}.tmp")
        with self._explained("write", path), _deleted_on_failure(temporary):
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, full)
            _fsync_folder(full.parent)

    def put_new(self, path: str, data: bytes) -> bool:
        """See :meth:`Storage.put_new`."""
        try:
            self.create(path, [memoryview(data)])
        except StorageError as error:
            if isinstance(error.__cause__, FileExistsError):
                return False
            raise
        return True

    def delete(self, path: str) -> None:
        """See :meth:`Storage.delete`."""
        with self._explained("delete", path), suppress(FileNotFoundError):
            self._check_inside(path)
            os.unlink(self.root / path)

    def delete_folder(self, path: str) -> None:
        """See :meth:`Storage.delete_folder`."""
        with self._explained("delete", path), suppress(FileNotFoundError):
            self._check_inside(path)
            shutil.rmtree(self.root / path)

    def make_folder(self, path: str = "") -> None:
        """See :meth:`Storage.make_folder`."""
        full = self.root / path
        with self._explained("make the folder", path):
            missing = [full, *full.parents]
            missing = missing[: next(i for i, p in enumerate(missing) if p.is_dir())]
            full.mkdir(parents=True, exist_ok=True)
            for made in missing:
                _fsync_folder(made.parent)  # the new name itself must survive a power cut

    def _check_inside(self, path: str) -> None:
        """What is deleted is in this folder, and not where a link in it leads."""
        folder = self.root
        for part in Path(path).parts[:-1]:
            folder /= part
            if folder.is_symlink():
                raise NotReadable(f"{folder.name} is a link to somewhere else", folder)

    def _explained(self, verb: str, path: str) -> AbstractContextManager[None]:
        return explained(verb, self.full(path))


class _LocalFile(ScatteringFile):
    def __init__(self, storage: LocalStorage, path: str) -> None:
        self.path = storage.full(path)
        self._handle = -1
        self._handle = open_descriptor(storage.root / path)
        self.size = os.fstat(self._handle).st_size

    def read_into(self, offset: int, into: memoryview) -> int:
        return self.read_scattered(offset, [into])

    def read_scattered(self, offset: int, into: Sequence[memoryview]) -> int:
        with explained("read", self.path):
            return read_handle(self._handle, offset, into)

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __del__(self) -> None:
        self.close()


def read_handle(handle: int, offset: int, into: Sequence[memoryview]) -> int:
    """Fill one after the other from an open file; how many bytes there were before its end."""
    left, done = [view for view in into if len(view)], 0
    while left:
        # The kernel takes so many places, gives at most 2 GiB, and may stop short anywhere.
        got = os.preadv(handle, left[:_MOST_VIEWS], offset + done)
        if got == 0:
            break
        done += got
        left = _beyond(got, left)
    return done


def _beyond(count: int, views: Sequence[memoryview]) -> list[memoryview]:
    """What is left of ``views`` after their first ``count`` bytes."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []


def open_storage(
    where: str | os.PathLike[str],
    options: dict[str, Any] | None = None,
    digest: Digest = XXH3,
) -> Storage:
    """The storage at a path, a ``file://`` URL, or any other URL that fsspec knows (``s3://…``).

    ``options`` go to the file system behind a URL: credentials, endpoints. See its documentation.
    ``digest``: see :attr:`Storage.digest`.
    """
    storage = _opened(where, options)
    storage.digest = digest
    return storage


def is_url(where: str) -> bool:
    """Whether ``where`` is a URL, or a chain of them (``a::b``), of anything but local files."""
    return _URL.match(where) is not None and not where.startswith("file://")


def _opened(where: str | os.PathLike[str], options: dict[str, Any] | None) -> Storage:
    text = os.fspath(where)
    if is_url(text):
        from paceline.checkpoint.storage.remote import FsspecStorage

        return FsspecStorage(text, options)
    if options:
        raise CheckpointError(
            f"storage options {', '.join(sorted(options))} for {text}: a local folder takes none. "
            "Leave them out, or give a URL such as s3://bucket/folder."
        )
    return LocalStorage(text.removeprefix("file://"))


@contextmanager
def _deleted_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):  # the first error is the one to tell
            path.unlink(missing_ok=True)
        raise


def _fsync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems know no fsync of a folder
            raise
    finally:
        os.close(handle)
