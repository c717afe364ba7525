"""Segments of shared memory, mapped into the process that writes them. See ``segment_files``."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.hashing import XXH3, Digest
from paceline.checkpoint.memory.segment_files import SlotName, remove_files, step_in
from paceline.checkpoint.sharded.host_copy import pin_memory
from paceline.checkpoint.storage.local import LocalStorage
from paceline.checkpoint.storage.os_errors import explained
from paceline.errors import CheckpointError

_PAGE = mmap.PAGESIZE
_SLACK = 1024 * 1024


class Segment:
    """One segment; ``memory`` is its bytes, once room is reserved."""

    def __init__(self, folder: Path, name: SlotName) -> None:
        self.name = name
        self.memory: Tensor = torch.empty(0, dtype=torch.uint8)
        self._folder = folder
        self._path = folder / f"{name}.bin"
        self._storage = LocalStorage(folder)
        self._index: bytes | None = None
        self._inode = 0
        self._pinned = False

    def has_room(self, size: int) -> bool:
        """Whether ``reserve`` would do nothing: neither too small nor far too large."""
        have = len(self.memory)
        return max(size, 1) <= have <= 2 * size + 4 * _SLACK

    def reserve(self, size: int, *, pin: bool = False) -> None:
        """Have room for ``size`` bytes and a little more; what the segment held is gone.

        The memory is really taken from the system here: where there is not enough, this raises,
        so that no later write kills the process. ``pin`` registers it with CUDA.
        """
        if self.has_room(size):
            return
        self.close()
        self.clear()
        # A little more: objects grow and shrink from one snapshot to the next.
        rounded = -(-(size + min(size // 64 + _PAGE, _SLACK)) // _PAGE) * _PAGE
        with explained("write", str(self._path)):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            handle = os.open(self._path, flags, 0o600)
            try:
                os.ftruncate(handle, min(os.fstat(handle).st_size, rounded))
                self._take(handle, rounded)
                # Populated: else the first copy would pay for every page.
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                mapped = mmap.mmap(handle, rounded, flags=flags)
                self._inode = os.fstat(handle).st_ino
            finally:
                os.close(handle)
        self.memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self._pinned = pin and pin_memory(self.memory)

    def _take(self, handle: int, size: int) -> None:
        try:
            os.posix_fallocate(handle, 0, size)
        except OSError as error:
            missing = size - os.fstat(handle).st_blocks * 512
            there = os.fstatvfs(handle)
            self.remove()
            raise CheckpointError(
                f"the snapshot in memory needs {missing} more bytes in {self._folder}, where "
                f"{there.f_bavail * there.f_frsize} are free ({os.strerror(error.errno or 0)}). "
                "Enlarge the shared memory (mount -o remount,size=… on it; --shm-size for a "
                "container), or switch the snapshots in memory off."
            ) from None

    def clear(self) -> None:
        """From here on the segment does not count."""
        self._storage.delete(f"{self.name}.json")

    def put_index(self, index: bytes) -> None:
        """Say which tensors the bytes are; the segment must not count at this time."""
        if index != self._index:
            self._storage.replace(f"{self.name}.index", index)
            self._index = index

    def commit(self, header: bytes) -> None:
        """Make the segment count; ``header`` is what ``segment_files.make_header`` made."""
        with explained("write", str(self._path)):
            if os.stat(self._path).st_ino != self._inode:
                raise FileNotFoundError(f"{self._path} is another file than it was")
        self._storage.replace(f"{self.name}.json", header)

    def close(self) -> None:
        """Let go of the memory; what it holds stays, for others."""
        if self._pinned:
            cuda: Any = torch.cuda.cudart()
            cuda.cudaHostUnregister(self.memory.data_ptr())
        self._pinned = False
        self._index = None
        # The mapping itself goes with the last view of it.
        self.memory = torch.empty(0, dtype=torch.uint8)

    def remove(self) -> None:
        """Give the memory back to the system."""
        self.close()
        remove_files(self._folder, self.name)


class Slots:
    """The two segments for the share of one rank; ``spare`` is the one to write next.

    ``keep`` is the step and the run's identity of the snapshot that must stay until there is a
    newer one. A segment of anything else does not count any more.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        kind: str,
        keep: tuple[int, str] | None,
        digest: Digest = XXH3,
    ) -> None:
        self.rank = rank
        self.both = [Segment(folder, SlotName(rank, kind, slot)) for slot in (0, 1)]
        self._spare = 0
        for slot, segment in enumerate(self.both):
            if keep is not None and step_in(folder, segment.name, keep[1], digest) == keep[0]:
                self._spare = 1 - slot
            else:
                segment.clear()

    @property
    def spare(self) -> Segment:
        """The one to write next."""
        return self.both[self._spare]

    @property
    def other(self) -> Segment:
        """The one that was written last."""
        return self.both[1 - self._spare]

    def turn(self) -> None:
        """What was written is whole everywhere: write the other one next."""
        self._spare = 1 - self._spare
