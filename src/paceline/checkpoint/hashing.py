"""Hashing bytes block by block, while they are on their way to or from a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from paceline.checkpoint.digests import XXH3, Digest
from paceline.checkpoint.manifest import BLOCK, FileEntry

_WORTH_A_THREAD = 512 * 1024


class BlockHasher:
    """Takes the bytes of a file in order, in pieces of any size; knows its size and its hashes."""

    def __init__(self, block: int = BLOCK, digest: Digest = XXH3) -> None:
        if block < 1:
            raise ValueError(f"a block of {block} bytes: it takes at least 1.")
        self.block = block
        self.size = 0
        self._hashes: list[str] = []
        self._digest = digest
        self._current = digest.new()

    def update(self, data: memoryview | bytes | bytearray) -> None:
        """Take the next bytes of the file."""
        view = memoryview(data).cast("B")
        while len(view):
            piece = view[: self.block - self.size % self.block]
            self._current.update(piece)  # other threads run meanwhile
            self.size += len(piece)
            view = view[len(piece) :]
            if self.size % self.block == 0:
                self._hashes.append(self._current.hexdigest())
                self._current = self._digest.new()

    def digests(self) -> FileEntry:
        """The entry of the file in the manifest, for the bytes taken so far."""
        rest = [self._current.hexdigest()] if self.size % self.block else []
        return FileEntry(self.size, (*self._hashes, *rest), self.block)


def hashed(chunks: Iterable[memoryview], hasher: BlockHasher) -> Iterator[memoryview]:
    """Pass ``chunks`` on, a block at most at a time, while ``hasher`` takes them.

    A large piece is hashed in a second thread at the same time as whoever asked for it writes it;
    the next is passed on only when that is done, so a chunk's memory may be used anew by then.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="paceline-hash") as pool:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            for start in range(0, len(view), hasher.block):
                piece = view[start : start + hasher.block]
                if len(piece) < _WORTH_A_THREAD:
                    hasher.update(piece)
                    yield piece
                    continue
                try:
                    done = pool.submit(hasher.update, piece)
                except RuntimeError:  # Python shuts down and begins nothing new
                    hasher.update(piece)
                    yield piece
                else:
                    yield piece
                    done.result()


def hash_blocks(
    data: memoryview | bytes | bytearray, block: int = BLOCK, digest: Digest = XXH3
) -> tuple[str, ...]:
    """The hash of each block of ``data``, which begins where a block begins."""
    view = memoryview(data).cast("B")
    return tuple(digest.of(view[at : at + block]) for at in range(0, len(view), block))
