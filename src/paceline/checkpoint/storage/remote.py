"""Checkpoints in an object store, or on anything else that fsspec can reach by a URL."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile

from paceline.checkpoint.storage.storage import ReadableFile, Storage
from paceline.credentials import Secret, references, revealed, secret_values, without
from paceline.errors import CheckpointError, MissingExtra, StorageError
from paceline.masking import masked

_PART = 64 * 1024 * 1024  # a store takes at most 10,000 parts: this allows files of 640 GB
_QUESTIONS = 16
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "memory"}
"""There a folder is only the beginning of a name, and making one could make a whole bucket."""


class FsspecStorage(Storage):
    """The files under a URL. An object appears whole or not at all: that is its atomic rename."""

    read_span = 16 * 1024 * 1024

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        self._url = url.rstrip("/")
        self.where = masked(self._url)
        self.options = dict(options or {})
        opened_with = revealed(self.options)  # here, in the process that needs them, and not sooner
        self._secrets = secret_values(opened_with) | {
            Secret(reference).reveal() for reference in references(self.options)
        }
        protocol = url.partition(":")[0]
        self._has_folders = protocol not in _WITHOUT_FOLDERS
        try:
            self.fs, root = fsspec.url_to_fs(self._url, **opened_with)
        except ImportError as error:
            if protocol in ("s3", "s3a"):
                raise MissingExtra(f"s3fs, which {self.where} needs,", "s3") from error
            raise CheckpointError(f"cannot open {self.where}: {error}") from error
        except ValueError as error:
            raise CheckpointError(
                f"cannot open {self.where}: {self.text_of(error)}. Give a path, or a URL that "
                "fsspec knows, such as s3://bucket/folder."
            ) from self.cause(error)
        except TypeError as error:
            raise CheckpointError(
                f"cannot open {self.where} with the storage options "
                f"{', '.join(sorted(self.options)) or 'given'}: {self.text_of(error)}."
            ) from self.cause(error)
        self.root = root.rstrip("/")

    def names(self, folder: str = "") -> list[str]:
        """See ``Storage.names``."""
        full = self._full(folder)
        with self._explained("list", folder):
            self.fs.invalidate_cache()  # what others wrote meanwhile counts
            try:
                found = self.fs.ls(full, detail=False)
            except FileNotFoundError:
                return []
        inside = full.strip("/") + "/"
        names = (path.strip("/").removeprefix(inside) for path in found)
        return sorted(name for name in names if name and "/" not in name)

    def size(self, path: str) -> int | None:
        """See ``Storage.size``."""
        with self._explained("look at", path):
            self.fs.invalidate_cache()
            try:
                info = self.fs.info(self._full(path))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return None if info.get("type") == "directory" else int(info["size"])

    def sizes(self, paths: Sequence[str]) -> list[int | None]:
        """See ``Storage.sizes``; several questions under way at once."""
        with ThreadPoolExecutor(_QUESTIONS) as pool:
            return list(pool.map(self.size, paths))

    def open_read(self, path: str) -> ReadableFile:
        """See ``Storage.open_read``."""
        size = self.size(path)
        if size is None:
            raise StorageError(
                f"cannot read {self.full(path)}: there is no such object. Something removed it "
                "meanwhile?"
            )
        return _RemoteFile(self, path, size)

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """Bytes ``start`` to ``end`` of an object; fewer where it ends before."""
        with self._explained("read", path):
            return self.fs.cat_file(self._full(path), start=start, end=end)

    def create(self, path: str, chunks: Iterable[memoryview]) -> None:
        """See ``Storage.create``."""
        with self._explained("write", path):
            file = self.fs.open(self._full(path), "wb", block_size=_PART)
        try:
            for chunk in chunks:
                with self._explained("write", path):
                    file.write(chunk)
            with self._explained("write", path):
                file.close()
        except BaseException:
            self._abandon(file, path)
            raise

    def replace(self, path: str, data: bytes) -> None:
        """See ``Storage.replace``: one PUT, which object stores do whole or not at all."""
        with self._explained("write", path):
            self.fs.pipe_file(self._full(path), data)

    def put_new(self, path: str, data: bytes) -> bool:
        """See ``Storage.put_new``.

        Of two that try at once only one succeeds where the store can tell (S3 and others can).
        """
        try:
            self.fs.pipe_file(self._full(path), data, mode="create")
        except FileExistsError:
            return False
        except Exception:  # a store that cannot do it, or says "exists" in words of its own
            if self.size(path) is not None:
                return False
            self.replace(path, data)
        return True

    def move(self, path: str, to: str) -> None:
        """See ``Storage.move``: a copy that the store makes itself, and then the old one goes."""
        with self._explained("move", path):
            self.fs.cp_file(self._full(path), self._full(to))
            self.fs.rm_file(self._full(path))

    def delete(self, path: str) -> None:
        """See ``Storage.delete``."""
        with self._explained("delete", path), suppress(FileNotFoundError):
            self.fs.rm_file(self._full(path))

    def delete_folder(self, path: str) -> None:
        """See ``Storage.delete_folder``."""
        with self._explained("delete", path), suppress(FileNotFoundError):
            self.fs.invalidate_cache()
            self.fs.rm(self._full(path), recursive=True)

    def make_folder(self, path: str = "") -> None:
        """See ``Storage.make_folder``; nothing to do where folders are only names."""
        if self._has_folders:
            with self._explained("make the folder", path):
                self.fs.makedirs(self._full(path), exist_ok=True)

    def _abandon(self, file: Any, path: str) -> None:
        """Give up an upload; the error that led here is the one to report."""
        if isinstance(file, AbstractBufferedFile):
            with suppress(Exception):
                file.discard()
            file.closed = True  # closing it would upload what there is as if it were whole
        with suppress(Exception):
            self.fs.rm_file(self._full(path))

    def _full(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    @contextmanager
    def _explained(self, verb: str, path: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # stores raise their client library's own kinds
            untouched = "Earlier checkpoints are untouched. " if verb == "write" else ""
            raise StorageError(
                f"cannot {verb} {self.full(path)}: {type(error).__name__}: {self.text_of(error)}. "
                f"{untouched}Check the URL, the storage options, the credentials and the network."
            ) from self.cause(error)

    def text_of(self, error: BaseException) -> str:
        """What ``error`` says, without the credentials that client libraries repeat."""
        return without(str(error), self._secrets)

    def cause(self, error: BaseException) -> BaseException | None:
        """``error`` to chain to, unless its traceback would show a credential."""
        text = "".join(traceback.format_exception(error))
        return error if without(text, self._secrets) == text else None


class _RemoteFile(ReadableFile):
    def __init__(self, storage: FsspecStorage, path: str, size: int) -> None:
        self.storage = storage
        self.path = path
        self.size = size

    def read_into(self, offset: int, into: memoryview) -> int:
        end = min(offset + len(into), self.size)
        if end <= offset:
            return 0
        data = self.storage.read_range(self.path, offset, end)
        into[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Nothing is held between reads."""
