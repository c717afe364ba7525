"""Checkpoints in a folder of this machine, or in one mounted on it."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from paceline.checkpoint.storage.os_errors import explained
from paceline.checkpoint.storage.storage import ReadableFile, ScatteringFile, Storage
from paceline.errors import StorageError
from paceline.untrusted import MIB, NotReadable, open_descriptor

_BUFFER = MIB
_MOST_VIEWS = os.sysconf("SC_IOV_MAX")


class LocalStorage(Storage):
    """A folder of this machine, or one mounted on it."""

    def __init__(self, where: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(os.fspath(where)))
        self.where = str(self.root)

    def names(self, folder: str = "") -> list[str]:
        """See ``Storage.names``."""
        with self._explained("list", folder):
            try:
                return sorted(os.listdir(self.root / folder))
            except FileNotFoundError:
                return []

    def size(self, path: str) -> int | None:
        """See ``Storage.size``."""
        with self._explained("look at", path):
            try:
                found = os.stat(self.root / path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None  # reading a pipe would hang

    def open_read(self, path: str) -> ReadableFile:
        """See ``Storage.open_read``."""
        with self._explained("read", path):
            return _LocalFile(self, path)

    def create(self, path: str, chunks: Iterable[memoryview]) -> None:
        """See ``Storage.create``. A file that is there already is refused."""
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
        """See ``Storage.replace``."""
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
        """See ``Storage.put_new``."""
        try:
            self.create(path, [memoryview(data)])
        except StorageError as error:
            if isinstance(error.__cause__, FileExistsError):
                return False
            raise
        return True

    def move(self, path: str, to: str) -> None:
        """See ``Storage.move``."""
        with self._explained("move", path):
            for name in (path, to):
                self._check_inside(name)
            os.replace(self.root / path, self.root / to)
            for changed in {(self.root / name).parent for name in (path, to)}:
                _fsync_folder(changed)

    def delete(self, path: str) -> None:
        """See ``Storage.delete``."""
        with self._explained("delete", path), suppress(FileNotFoundError):
            self._check_inside(path)
            os.unlink(self.root / path)

    def delete_folder(self, path: str) -> None:
        """See ``Storage.delete_folder``."""
        with self._explained("delete", path), suppress(FileNotFoundError):
            self._check_inside(path)
            shutil.rmtree(self.root / path)

    def make_folder(self, path: str = "") -> None:
        """See ``Storage.make_folder``."""
        full = self.root / path
        with self._explained("make the folder", path):
            missing = [full, *full.parents]
            missing = missing[: next(i for i, p in enumerate(missing) if p.is_dir())]
            full.mkdir(parents=True, exist_ok=True)
            for made in missing:
                _fsync_folder(made.parent)  # the new name itself must survive a power cut

    def _check_inside(self, path: str) -> None:
        """What is deleted or moved is in this folder, and not where a link in it leads."""
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


@contextmanager
def _deleted_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):  # the first error is the one to report
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
