"""Formats of shards: how many samples one has, and how its samples are read from any block on.

Samples are read in blocks of 128. A block holds records that are not decoded yet: whoever needs one
sample of a block pays for decoding one.
"""

from __future__ import annotations

import inspect
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any
from zlib import crc32

from paceline.data.randomness import isolated, seed_all, seed_for
from paceline.data.shard_files import ShardFile, version_of
from paceline.errors import DataError
from paceline.masking import masked
from paceline.torch_internals import outside_loader_worker

BLOCK = 128
_from_json = json.JSONDecoder().decode  # json.loads would look which encoding it is


@dataclass(frozen=True)
class ShardIndex:
    """What is known of a shard before its samples are read."""

    count: int
    """Samples in it."""
    offsets: tuple[int, ...] = ()
    """Where in the file each block begins, and where the last ends; for formats that need it."""


class ShardFormat(ABC):
    """One kind of shard."""

    name: str
    from_any_block = True
    """Whether reading starts at any block; else everything before is read and thrown away."""

    @abstractmethod
    def open(self, shard: Any) -> Any:
        """The shard, opened: what the other methods take. Has a ``close`` where it needs one."""

    @abstractmethod
    def index(self, shard: Any) -> ShardIndex:
        """Count the samples of a shard."""

    @abstractmethod
    def blocks(self, opened: Any, index: ShardIndex, first: int) -> Iterator[Sequence[Any]]:
        """Blocks of records, from block ``first`` on; all but the last have 128."""

    @abstractmethod
    def sample(self, opened: Any, record: Any, number: int) -> Any:
        """The sample that ``record`` holds, the shard's ``number``-th."""

    def shown(self, shard: Any) -> str:
        """The shard as an error names it."""
        return masked(str(shard))

    def version(self, shard: Any) -> str | None:
        """What changes when the shard does; ``None`` where nobody can tell."""
        return None


class FileFormat(ShardFormat):
    """Shards that are files."""

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        self.storage_options = storage_options

    def open(self, shard: str) -> ShardFile:
        """The file, or a copy of it."""
        return ShardFile(shard, self.storage_options)

    def version(self, shard: str) -> str:
        """Size and time of the last change."""
        return version_of(shard, self.storage_options)

    def index(self, shard: str) -> ShardIndex:
        """Count the samples of a shard."""
        opened = self.open(shard)
        try:
            return self.index_of(opened)
        finally:
            opened.close()

    @abstractmethod
    def index_of(self, opened: ShardFile) -> ShardIndex:
        """Count the samples of an opened file."""


class LineFormat(FileFormat):
    """A sample a line. Lines of nothing but white space do not count."""

    def index_of(self, opened: ShardFile) -> ShardIndex:
        """Read the file once, noting where every 128th line begins."""
        count, at = 0, 0
        offsets: list[int] = []
        opened.file.seek(0)
        for line in opened.file:
            if not line.isspace():
                if count % BLOCK == 0:
                    offsets.append(at)
                count += 1
            at += len(line)
        return ShardIndex(count, (*offsets, at))

    def blocks(self, opened: ShardFile, index: ShardIndex, first: int) -> Iterator[list[bytes]]:
        """Blocks of lines, from block ``first`` on."""
        for block in range(first, len(index.offsets) - 1):
            text = opened.read(index.offsets[block], index.offsets[block + 1])
            yield [line for line in text.split(b"\n") if line and not line.isspace()]

    def sample(self, opened: ShardFile, record: bytes, number: int) -> Any:
        """The line, decoded."""
        try:
            return self.decode(record)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{opened.shown}, record {number}: {_first_line(error)}. Mend or remove the line: "
                f"{record[:60]!r}"
            ) from error

    @abstractmethod
    def decode(self, line: bytes) -> Any:
        """The sample in ``line``."""


class JsonLines(LineFormat):
    """A JSON value a line."""

    name = "jsonl"

    def decode(self, line: bytes) -> Any:
        """The value."""
        return _from_json(line.decode("utf-8"))


class TextLines(LineFormat):
    """A text a line, as ``{"text": …}``."""

    name = "text"

    def decode(self, line: bytes) -> dict[str, str]:
        """The line without its end."""
        return {"text": line.decode("utf-8").rstrip("\r\n")}


class FunctionFormat(ShardFormat):
    """Shards that a function of the user reads: ``read(shard)`` gives its samples one by one.

    A function with an argument ``start`` is called with the number of the first sample wanted.
    """

    name = "function"

    def __init__(self, read: Callable[..., Any], count: Callable[[Any], int] | None = None) -> None:
        self.read = read
        self.count = count
        self.from_any_block = _takes_start(read)

    def open(self, shard: Any) -> Any:
        """The shard as it was given: the function opens it."""
        return shard

    def index(self, shard: Any) -> ShardIndex:
        """Ask ``count``, or read the whole shard once."""
        if self.count is not None:
            count = self.count(shard)
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise DataError(
                    f"the number of samples in shard {self.shown(shard)} must be a whole number, "
                    f"0 or more, but is {count!r}."
                )
            return ShardIndex(count)
        with isolated():
            return ShardIndex(sum(1 for _ in self._samples(shard)))

    def blocks(self, opened: Any, index: ShardIndex, first: int) -> Iterator[list[Any]]:
        """Blocks of samples: from ``first`` on where the function can start there, else from 0.

        What the function draws from the process-wide generators depends on shard and block alone;
        a stream that would give each loader worker its own part gives all of the shard.
        """
        samples: Iterator[Any] | None = None
        plain = isinstance(opened, str | int | tuple | os.PathLike)  # else repr may be an address
        named = crc32(repr(opened).encode()) if plain else index.count
        block = first if self.from_any_block else 0
        while True:
            with isolated(in_workers=True), outside_loader_worker():
                seed_all(seed_for(named, block))
                if samples is None:
                    samples = self._samples(opened, first * BLOCK if self.from_any_block else None)
                records = list(islice(samples, BLOCK))
            if not records:
                return
            yield records
            block += 1

    def sample(self, opened: Any, record: Any, number: int) -> Any:
        """The sample is there already."""
        return record

    def _samples(self, shard: Any, start: int | None = None) -> Iterator[Any]:
        read = self.read(shard) if start is None else self.read(shard, start=start)
        try:
            return iter(read)
        except TypeError:
            raise DataError(
                f"read({self.shown(shard)}) gave a {type(read).__name__}: it must give the "
                "samples of the shard one by one, as a generator or a list does."
            ) from None


def _takes_start(read: Callable[..., Any]) -> bool:
    try:
        return "start" in inspect.signature(read).parameters
    except (TypeError, ValueError):  # built-in functions may have no signature
        return False


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
