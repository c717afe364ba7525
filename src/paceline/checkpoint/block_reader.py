"""Reading a file of a checkpoint through its blocks, each checked against the manifest."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from paceline.checkpoint.hashing import XXH3, BlockHasher, Digest, FileEntry
from paceline.checkpoint.storage.storage import ReadableFile, ScatteringFile, Storage
from paceline.errors import CheckpointDamaged, CheckpointError, StorageError

Target = tuple[int, memoryview]
"""Where in a file bytes begin, and the memory that they are to fill."""

_MOST_THREADS = 4
_BATCH = 8  # blocks that a thread is given at a time: handing them over takes time, too


@dataclass(frozen=True)
class Damage:
    """Something that is not as it was saved: which ``file``, ``what`` of it; a sentence as text."""

    file: str
    what: str
    expected: str = ""
    found: str = ""

    def __str__(self) -> str:
        if not self.expected:
            return self.what
        return f"{self.file} is damaged: {self.what}: expected {self.expected}, found {self.found}."


class BlockReader:
    """Ranges of bytes of one file. Raises ``CheckpointDamaged`` rather than hand out a wrong byte.

    For one thread. Keeps the block read last, so that small ranges in order cost one read a block.
    """

    def __init__(
        self, storage: Storage, path: str, entry: FileEntry, digest: Digest = XXH3
    ) -> None:
        self.path = storage.full(path)
        self.entry = entry
        self._digest = digest
        self._span = max(storage.read_span // entry.block, 1) * entry.block
        self._kept: tuple[int, memoryview] | None = None
        self._buffer: memoryview | None = None
        if (size := storage.size(path)) != entry.size:
            raise CheckpointDamaged(str(_size_damage(self.path, entry, size)))
        self._file = storage.open_read(path)

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()
        self._kept = self._buffer = None

    def read(self, start: int, length: int) -> bytearray:
        """The bytes from ``start`` on."""
        data = bytearray(length)
        self.read_into(start, memoryview(data))
        return data

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``start`` on.

        Whole blocks are read to where they belong and checked there: what ``into`` holds counts
        only once this has returned.
        """
        into = into.cast("B") if into.nbytes else memoryview(bytearray())
        block, end = self.entry.block, start + len(into)
        self._check_range(start, end)
        at = start
        while at < end:
            whole = self._whole_blocks(at, end)
            if whole:
                self._fetch(at, into[at - start : at - start + whole])
                at += whole
            else:
                first = at // block * block
                stop = min(end, first + block)
                into[at - start : stop - start] = self._block(first)[at - first : stop - first]
                at = stop

    def scatter(self, targets: Sequence[Target]) -> None:
        """Fill every target, as ``read_into`` would; they are given in the order of the file.

        From local files each block is read once, straight to all places that its bytes belong to,
        and checked there, by a few threads. What the targets hold counts only once this returned.
        """
        file = self._file
        if not isinstance(file, ScatteringFile) or _overlapping(targets):
            for start, into in targets:
                self.read_into(start, into)
            return
        for start, into in targets:
            self._check_range(start, start + len(into))
        # The first and the last are kept: what is read before or after may be in them, too.
        blocks = list(_by_block(targets, self.entry.block))
        first, between, last = blocks[:1], blocks[1:-1], blocks[1:][-1:]
        self._copy_out(first)
        batches = [between[at : at + _BATCH] for at in range(0, len(between), _BATCH)]
        with ThreadPoolExecutor(_threads(), thread_name_prefix="paceline-read") as pool:
            for _ in pool.map(functools.partial(self._scatter_blocks, file), batches):
                pass  # the first in the file that is damaged raises here
        self._copy_out(last)

    def _copy_out(self, blocks: Sequence[list[Target]]) -> None:
        for wanted in blocks:
            for start, into in wanted:
                self.read_into(start, into)

    def _scatter_blocks(self, file: ScatteringFile, blocks: Sequence[list[Target]]) -> None:
        for wanted in blocks:
            self._scatter_block(file, wanted)

    def _scatter_block(self, file: ScatteringFile, wanted: list[Target]) -> None:
        """Read one block: what is ``wanted`` of it to its place, the rest to nowhere."""
        at = first = wanted[0][0] // self.entry.block * self.entry.block
        end = min(first + self.entry.block, self.entry.size)
        places: list[memoryview] = []
        for start, into in (*wanted, (end, memoryview(b""))):
            if start > at:
                places.append(memoryview(bytearray(start - at)))
            places.append(into)
            at = start + len(into)
        found = file.read_scattered(first, places)
        if found != end - first:
            raise self._cut_short(first + found)
        hasher = BlockHasher(self.entry.block, self._digest)
        for place in places:
            hasher.update(place)
        expected, [digest] = self.entry.hashes[first // self.entry.block], hasher.digests().hashes
        if digest != expected:
            raise CheckpointDamaged(
                str(Damage(self.path, f"block at byte {first}", expected, digest))
            )

    def _check_range(self, start: int, end: int) -> None:
        if start < 0 or end > self.entry.size:
            raise CheckpointError(
                f"bytes {start} to {end} of {self.path}: it has {self.entry.size}."
            )

    def _whole_blocks(self, at: int, end: int) -> int:
        """How many bytes from ``at`` to ``end`` are whole blocks, to be read in one go."""
        if at % self.entry.block:
            return 0
        if end == self.entry.size:  # the last block is whole, however short
            return min(end - at, self._span)
        return min((end - at) // self.entry.block * self.entry.block, self._span)

    def _block(self, first: int) -> memoryview:
        """The whole block that begins at ``first``."""
        if self._kept is None or self._kept[0] != first:
            if self._buffer is None:
                self._buffer = memoryview(bytearray(min(self.entry.block, self.entry.size)))
            self._kept = None  # what the buffer holds is not what it says from here on
            data = self._buffer[: min(self.entry.block, self.entry.size - first)]
            self._fetch(first, data)
            self._kept = first, data
        return self._kept[1]

    def _fetch(self, first: int, into: memoryview) -> None:
        found = self._file.read_into(first, into)
        if found != len(into):
            raise self._cut_short(first + found)
        for damage in _wrong_blocks(self.path, self.entry, first, into, self._digest):
            raise CheckpointDamaged(str(damage))

    def _cut_short(self, found: int) -> CheckpointDamaged:
        return CheckpointDamaged(
            f"{self.path} is damaged: expected {self.entry.size} bytes, found {found}."
        )


def _threads() -> int:
    """How many threads read: the ranks of a machine share its cores."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    cores = (os.cpu_count() or 1) // (int(ranks) if ranks.isdigit() else 1)
    return max(1, min(cores, _MOST_THREADS))


def _overlapping(targets: Sequence[Target]) -> bool:
    """Whether any begins before the one before it ends."""
    ends = [start + len(into) for start, into in targets]
    return any(start < end for (start, _), end in zip(targets[1:], ends[:-1], strict=True))


def _by_block(targets: Sequence[Target], block: int) -> Iterator[list[Target]]:
    """The targets cut where blocks end: one list for each block that is wanted."""
    wanted: list[Target] = []
    for start, into in targets:
        at = 0
        while at < len(into):
            place = start + at
            piece = into[at : at + block - place % block]
            if wanted and wanted[0][0] // block != place // block:
                yield wanted
                wanted = []
            wanted.append((place, piece))
            at += len(piece)
    if wanted:
        yield wanted


def file_damages(
    storage: Storage,
    path: str,
    name: str,
    entry: FileEntry,
    progress: Callable[[int], None],
    digest: Digest = XXH3,
) -> list[Damage]:
    """All that is wrong with one file."""
    if (size := storage.size(path)) != entry.size:
        progress(entry.size)
        return [_size_damage(name, entry, size)]
    try:
        with storage.open_read(path) as file:
            return _blocks_damages(file, name, entry, storage.read_span, progress, digest)
    except StorageError as error:
        if not error.unreadable:
            raise
        return [Damage(name, str(error))]


def _blocks_damages(
    file: ReadableFile,
    name: str,
    entry: FileEntry,
    span: int,
    progress: Callable[[int], None],
    digest: Digest,
) -> list[Damage]:
    step = max(span // entry.block, 1) * entry.block
    buffer = memoryview(bytearray(min(step, entry.size)))
    damages: list[Damage] = []
    for first in range(0, entry.size, step):
        into = buffer[: entry.size - first]
        found = file.read_into(first, into)
        if found != len(into):  # cut while being read
            return [*damages, _size_damage(name, entry, first + found)]
        damages += _wrong_blocks(name, entry, first, into, digest)
        progress(len(into))
    return damages


def _wrong_blocks(
    name: str, entry: FileEntry, first: int, data: memoryview, digest: Digest
) -> list[Damage]:
    """The blocks in ``data``, which begins at ``first``, that do not hash as they should."""
    damages = []
    for start in range(0, len(data), entry.block):
        expected = entry.hashes[(first + start) // entry.block]
        found = digest.of(data[start : start + entry.block])
        if found != expected:
            damages.append(Damage(name, f"block at byte {first + start}", expected, found))
    return damages


def _size_damage(name: str, entry: FileEntry, size: int | None) -> Damage:
    if size is None:
        return Damage(name, "missing", f"{entry.size} bytes", "no such file")
    return Damage(name, "size", f"{entry.size} bytes", f"{size} bytes")
