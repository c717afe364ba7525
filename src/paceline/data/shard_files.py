"""The files of shards: names and patterns of them, and one opened for reading wherever it lies.

A shard that is remote or compressed is copied to a temporary file of the process that reads it,
which goes away when the process lets go of it.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import fsspec
from fsspec.core import url_to_fs

from paceline.credentials import revealed
from paceline.errors import DataError, MissingExtra
from paceline.masking import masked
from paceline.untrusted import NotReadable, open_file

COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz"}
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_COPIED_AT_ONCE = 16 * 1024 * 1024


def file_names(files: Any, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """The files that a path, a URL, a pattern or a list of them names.

    ``train-{000..017}.tar`` counts from 000 to 017; ``*``, ``?`` and ``[…]`` match what is there,
    sorted by name.
    """
    given = [files] if isinstance(files, str | os.PathLike) else list(files)
    names: list[str] = []
    for item in given:
        if not isinstance(item, str | os.PathLike):
            raise DataError(
                f"shards: {item!r} is a {type(item).__name__}, but a file is named by a path or a "
                "URL. For shards of another kind, give read=, a function that is called with each."
            )
        for name in _counted(os.fspath(item)):
            names += _matching(name, storage_options) if _is_pattern(name) else [name]
    if not names:
        raise DataError("shards: no file was given. Name at least one path, URL or pattern.")
    repeated = sorted({name for name in names if names.count(name) > 1}) if _repeats(names) else []
    if repeated:
        raise DataError(
            f"shards: {masked(repeated[0])} is given {names.count(repeated[0])} times, so its "
            "samples would come as often in an epoch. Name each file once; to see one source more "
            "often than another, use paceline.data.mixture."
        )
    return names


def is_remote(name: str) -> bool:
    """Whether ``name`` is a URL of something else than a local file."""
    return "://" in name and not name.startswith("file://")


def local_path(name: str) -> str:
    """The path of a local file that may be given as a ``file://`` URL."""
    return name.removeprefix("file://")


def suffix_of(name: str) -> str:
    """``.jsonl`` of ``data/part.jsonl.gz``: the ending that tells the format."""
    stem = name.lower()
    for ending in COMPRESSED:
        stem = stem.removesuffix(ending)
    if stem.endswith(".tgz"):
        return ".tar"
    return os.path.splitext(stem)[1]


def version_of(name: str, storage_options: Mapping[str, Any] | None) -> str:
    """What changes when the file does: its size and the time, or the tag, of its last change."""
    if not is_remote(name):
        try:
            found = os.stat(local_path(name))
        except OSError as error:
            raise DataError(_cannot_open(name, error)) from error
        return f"{found.st_size} {found.st_mtime_ns}"
    info = _explained(name, lambda: _file_system(name, storage_options).info(_path_of(name)))
    tags = (info.get(key) for key in ("ETag", "etag", "mtime", "LastModified", "created"))
    return f"{info.get('size')} {next((str(tag) for tag in tags if tag is not None), '')}"


class ShardFile:
    """An open shard: bytes at any offset, of a local file or of a copy."""

    def __init__(self, name: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.file: BinaryIO = _opened(name, storage_options)
        self.size = os.fstat(self.file.fileno()).st_size

    @property
    def shown(self) -> str:
        """The file's name as an error shows it: without passwords."""
        return masked(self.name)

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from ``start`` to ``stop``; ``DataError`` where the file is shorter."""
        data = os.pread(self.file.fileno(), stop - start, start)
        while len(data) < stop - start:  # a read may be cut short, above all one of gigabytes
            more = os.pread(self.file.fileno(), stop - start - len(data), start + len(data))
            if not more:
                raise DataError(
                    f"{self.shown} ends at byte {start + len(data)}, before byte {stop}: it has "
                    "changed since it was indexed, or is cut short. Index it again."
                )
            data += more
        return data

    def close(self) -> None:
        """Let go of the file, and of its copy."""
        self.file.close()

    def __del__(self) -> None:
        if hasattr(self, "file"):  # opening it may have failed
            self.file.close()


def _opened(name: str, storage_options: Mapping[str, Any] | None) -> BinaryIO:
    compression = COMPRESSED.get(os.path.splitext(name.lower())[1])
    if name.lower().endswith(".tgz"):
        compression = "gzip"
    if not is_remote(name) and compression is None:
        try:
            return open_file(local_path(name))
        except (OSError, NotReadable) as error:
            raise DataError(_cannot_open(name, error)) from error
    return _explained(name, lambda: _copy(name, compression, storage_options))


def _copy(
    name: str, compression: str | None, storage_options: Mapping[str, Any] | None
) -> BinaryIO:
    copy: Any = tempfile.TemporaryFile(prefix="paceline-shard-")  # noqa: SIM115  # kept open
    try:
        if is_remote(name):
            options = revealed(dict(storage_options or {}))
            opened = fsspec.open(name, "rb", compression=compression, **options)
        else:
            opened = fsspec.open(local_path(name), "rb", compression=compression)
        with opened as original:
            shutil.copyfileobj(original, copy, _COPIED_AT_ONCE)
        copy.flush()
    except BaseException:
        copy.close()
        raise
    return copy


def _explained(name: str, call: Any) -> Any:
    """``call()``; what goes wrong with a file is a ``DataError`` that names it."""
    try:
        return call()
    except ImportError as error:
        if name.startswith(("s3://", "s3a://")):
            raise MissingExtra(f"s3fs, which {masked(name)} needs,", "s3") from error
        raise DataError(f"cannot open {masked(name)}: {error}.") from error
    except (OSError, EOFError, ValueError) as error:  # gzip and xz raise these for damaged data
        raise DataError(_cannot_open(name, error)) from error


def _cannot_open(name: str, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return f"cannot read the shard {masked(name)}: {masked(str(reason))}."


def _counted(name: str) -> Iterable[str]:
    found = _RANGE.search(name)
    if found is None:
        return [name]
    first, last = found.groups()
    if int(last) < int(first):
        raise DataError(
            f"shards: {found.group()} in {name!r} counts down: write {{{last}..{first}}}."
        )
    numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [
        each
        for number in numbers
        for each in _counted(name[: found.start()] + number + name[found.end() :])
    ]


def _is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[") and not os.path.exists(local_path(name))


def _matching(name: str, storage_options: Mapping[str, Any] | None) -> list[str]:
    if is_remote(name):
        system = _file_system(name, storage_options)
        found = _explained(name, lambda: system.glob(_path_of(name)))
        matching = sorted(system.unstrip_protocol(path) for path in found)
    else:
        matching = sorted(glob.glob(local_path(name), recursive=True))
    if not matching:
        raise DataError(f"shards: no file matches {masked(name)!r}. Check the folder it names.")
    return matching


def _file_system(name: str, storage_options: Mapping[str, Any] | None) -> Any:
    options = revealed(dict(storage_options or {}))
    return _explained(name, lambda: url_to_fs(name, **options))[0]


def _path_of(name: str) -> str:
    return name.partition("://")[2]


def _repeats(names: list[str]) -> bool:
    return len(set(names)) < len(names)
