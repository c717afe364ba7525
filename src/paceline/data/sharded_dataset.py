"""Data in shards: ``paceline.data.shards``, and streams that say what their shards are."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import PurePath
from typing import Any

from torch.utils.data import Dataset

from paceline.data.arguments import import_function, whole_number
from paceline.data.parquet_shards import ParquetFiles
from paceline.data.shard_files import file_names, suffix_of
from paceline.data.shard_formats import (
    FunctionFormat,
    JsonLines,
    ShardFormat,
    ShardIndex,
    TextLines,
)
from paceline.data.shard_index import index_shards
from paceline.data.shard_order import WINDOW, ShardOrder, default_lanes
from paceline.data.shard_reader import ShardReader
from paceline.data.shuffle_order import Order
from paceline.data.tar_shards import TarFiles
from paceline.errors import DataError

FORMATS = ("jsonl", "parquet", "tar", "text")
_ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".tar": "tar",
    ".txt": "text",
}


class ShardedDataset(Dataset[Any]):
    """Samples that lie in shards, made by ``paceline.data.shards``.

    Has a length and gives sample i, counted through all shards. A loader reads it in an order of
    its own, in which every reader goes through its part of the shards from front to back.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        shard_format: ShardFormat,
        indexes: Sequence[ShardIndex],
        *,
        map: Callable[[Any], Any] | None = None,
        lanes: int | None = None,
        chunk: int | None = None,
        window: int = WINDOW,
    ) -> None:
        self.shards = list(shards)
        self.counts = [index.count for index in indexes]
        self.map = map
        self._lanes = default_lanes(len(self.shards)) if lanes is None else lanes
        self._chunk, self._window = chunk, window
        self._ends = list(accumulate(self.counts))
        self._reader = ShardReader(self.shards, indexes, shard_format, self._lanes, window)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several samples at once, as a DataLoader asks for them."""
        samples = self._reader.samples(map(self._place, indices))
        return list(samples if self.map is None else map(self.map, samples))

    def _place(self, index: int) -> tuple[int, int]:
        """The shard of sample ``index``, and its number in it."""
        ends = self._ends
        if not -ends[-1] <= index < ends[-1]:
            raise IndexError(f"sample {index} is outside the {len(self)} samples of these shards")
        index %= ends[-1]
        shard = bisect_right(ends, index)
        return shard, index - (ends[shard] - self.counts[shard])

    def paceline_order(self, seed: int, shuffle: bool) -> Order:
        """The order in which a loader reads the samples."""
        names = [PurePath(shard).name for shard in self.shards if isinstance(shard, str)]
        return ShardOrder(
            self.counts,
            seed,
            shuffle,
            lanes=self._lanes,
            chunk=self._chunk,
            window=self._window,
            names=names,
        )


def shards(
    files: Any,
    read: str | Callable[..., Any] | None = None,
    *,
    map: str | Callable[[Any], Any] | None = None,
    columns: Sequence[str] | None = None,
    counts: Sequence[int] | None = None,
    index: str | os.PathLike[str] | None = None,
    lanes: int | None = None,
    chunk: int | None = None,
    window: int = WINDOW,
    storage_options: Mapping[str, Any] | None = None,
) -> ShardedDataset:
    """A dataset over many files, for ``paceline.loader`` or ``Trainer.fit``.

    Its order is shuffled by the seed and the same for any number of ranks and workers; each of them
    reads a part of the shards from front to back.

    - ``files``: a path, URL or pattern (``train-{000..017}.tar``, ``s3://bucket/*.jsonl.gz``), or a
      list of them. A remote or compressed file is copied to a temporary one while it is read.
    - ``read``: ``"tar"`` (WebDataset), ``"jsonl"``, ``"parquet"`` or ``"text"``; by default what
      the files' ending says. Or a function (or its import path, ``"package.module:name"``) that is
      called with an item of ``files``, which may then be anything, and gives its samples.
    - ``map``: a function, or its import path, that makes a sample of what was read. It may draw
      random numbers.
    - ``columns``: those of a Parquet file to read.
    - ``counts``: the number of samples in each shard, if you know them. Else they are counted:
      Parquet by its footer, tar by its headers, others by reading them once.
    - ``index``: a file that remembers the counts, and is made where it is missing.
    - ``lanes``, ``chunk``, ``window``: how samples are mixed. The shards are read in ``lanes``
      places at once (by default as many as there are shards, at most 64), ``chunk`` samples from
      each in turn (by default 16, fewer of a small dataset), shuffled in windows of ``window``.
    - ``storage_options``: for the URLs' file system, as fsspec takes them.
    """
    for name, value, meaning in (
        ("lanes", lanes, "number of places that are read at once"),
        ("chunk", chunk, "number of samples each lane gives in turn"),
        ("window", window, "number of samples that are shuffled together"),
    ):
        if value is not None:
            whole_number(name, value, 1, meaning)
    if hasattr(files, "num_shards") and hasattr(files, "shard"):
        files, read = _huggingface(files, read)
    function = import_function(read) if isinstance(read, str) and ":" in read else read
    items: list[Any]
    if callable(function):
        items = [files] if isinstance(files, str | os.PathLike) else list(files)
        shard_format: ShardFormat = FunctionFormat(function)
    else:
        items = file_names(files, storage_options)
        shard_format = _format(items, function, columns, storage_options)
    if not items:
        raise DataError("shards: the list of shards is empty. Give at least one.")
    if columns is not None and not isinstance(shard_format, ParquetFiles):
        raise DataError(
            f"shards: columns={list(columns)!r} is for Parquet, but these are {shard_format.name} "
            "shards. Pick the parts of a sample with map=."
        )
    indexes = _indexes(items, shard_format, counts, index)
    return _dataset(
        items,
        shard_format,
        indexes,
        map=import_function(map) if isinstance(map, str) else map,
        lanes=lanes,
        chunk=chunk,
        window=window,
    )


def _dataset(
    items: list[Any], shard_format: ShardFormat, indexes: list[ShardIndex], **options: Any
) -> ShardedDataset:
    if not sum(index.count for index in indexes):
        raise DataError(
            f"none of the {len(items)} shards has a sample; the first is "
            f"{shard_format.shown(items[0])}. Check what they hold, and how they are read."
        )
    return ShardedDataset(items, shard_format, indexes, **options)


def is_presharded(dataset: Any) -> bool:
    """Whether a stream says what its shards are: ``shards``, and ``read_shard(shard)``."""
    return hasattr(dataset, "shards") and callable(getattr(dataset, "read_shard", None))


def of_presharded(dataset: Any) -> ShardedDataset:
    """The samples of a stream that says what its shards are."""
    items = list(dataset.shards)
    name = type(dataset).__name__
    if not items:
        raise DataError(f"{name}.shards is empty: there is nothing to read.")
    shard_format = FunctionFormat(dataset.read_shard, getattr(dataset, "count_shard", None))
    return _dataset(items, shard_format, index_shards(items, shard_format, None))


def _format(
    files: list[str],
    name: str | None,
    columns: Sequence[str] | None,
    storage_options: Mapping[str, Any] | None,
) -> ShardFormat:
    if name is None:
        endings = {suffix_of(file) for file in files}
        formats = {_ENDINGS.get(ending) for ending in endings}
        if len(formats) > 1 or None in formats:
            raise DataError(
                f"shards: the endings {', '.join(sorted(map(repr, endings)))} do not tell one "
                f"format. Say which: read= one of {', '.join(map(repr, FORMATS))}, or a function."
            )
        name = formats.pop()
    match name:
        case "parquet":
            return ParquetFiles(columns, storage_options)
        case "tar":
            return TarFiles(storage_options)
        case "jsonl":
            return JsonLines(storage_options)
        case "text":
            return TextLines(storage_options)
    raise DataError(
        f"shards: read={name!r} must be one of {', '.join(map(repr, FORMATS))}, a function that "
        "gives the samples of a shard, or the import path of one ('package.module:name')."
    )


def _indexes(
    items: list[Any],
    shard_format: ShardFormat,
    counts: Sequence[int] | None,
    index: str | os.PathLike[str] | None,
) -> list[ShardIndex]:
    if counts is None:
        return index_shards(items, shard_format, index)
    if not isinstance(shard_format, FunctionFormat | ParquetFiles):
        raise DataError(
            f"shards: counts= is not for {shard_format.name} files, of which Paceline notes where "
            "samples begin, too. Give index= a file that remembers both."
        )
    if index is not None:
        raise DataError("shards: give counts= or index=, not both.")
    if len(counts) != len(items):
        raise DataError(f"shards: {len(counts)} counts for {len(items)} shards: give one for each.")
    return [
        ShardIndex(whole_number(f"counts[{place}]", count, 0, "number of samples in that shard"))
        for place, count in enumerate(counts)
    ]


def _huggingface(stream: Any, read: Any) -> tuple[range, Callable[[int], Any]]:
    """The shards of a Hugging Face dataset, and how each is read."""
    if read is not None:
        raise DataError(
            f"shards: a {type(stream).__name__} reads itself: leave read= out, or give map=."
        )
    number = stream.num_shards

    def read_shard(shard: int) -> Any:
        return stream.shard(num_shards=number, index=shard)

    return range(number), read_shard
