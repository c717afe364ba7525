"""One checkpoint: what it says of itself, whether its bytes are those it was saved with.

Nothing is handed out that was not checked: every byte comes through a block whose hash is the one
in the manifest. Reading executes no code from a file and needs no process group.
"""

from __future__ import annotations

import io
import math
import os
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.block_reader import BlockReader, Damage, file_damages
from paceline.checkpoint.hashing import Digest
from paceline.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    ObjectEntry,
    Stored,
    TensorEntry,
    step_of,
)
from paceline.checkpoint.manifest_fields import MOST_BYTES, too_large
from paceline.checkpoint.storage.open import open_storage
from paceline.checkpoint.storage.storage import Storage
from paceline.checkpoint.tensor_bytes import dtype_of, empty_tensor, memory_of
from paceline.errors import CheckpointDamaged, CheckpointError, KeyNeeded, StorageError

_MOST_OPEN = 8


class Checkpoint:
    """The folder ``name`` in ``storage``. Making one reads nothing yet."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage = storage
        self.name = name
        self._open: OrderedDict[str, BlockReader] | None = None

    @classmethod
    def at(cls, where: str | os.PathLike[str], options: dict[str, Any] | None = None) -> Checkpoint:
        """The checkpoint whose own folder (or URL) is ``where``."""
        text = os.fspath(where).rstrip("/")
        if "://" not in text:
            text = os.path.abspath(text)
        above, _, name = text.rpartition("/")
        return cls(open_storage(above or "/", options), name)

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r})"

    @property
    def path(self) -> str:
        """Where it is, for people and for ``at``."""
        return self.storage.full(self.name)

    @property
    def step(self) -> int:
        """After which optimizer step it was saved; known even where the manifest is damaged."""
        step = step_of(self.name)
        return self.manifest.step if step is None else step

    @cached_property
    def manifest(self) -> Manifest:
        """What it holds, read once. Raises where it is missing, damaged or another one's."""
        path = f"{self.name}/{MANIFEST}"
        where = self.storage.full(path)
        size = self.storage.size(path)
        if size is None:
            raise CheckpointDamaged(
                f"{self.path} holds no {MANIFEST}: it is no checkpoint, or was never finished."
            )
        if size > MOST_BYTES:
            raise CheckpointDamaged(too_large(where, size))
        found = Manifest.from_bytes(self.storage.read_bytes(path), where, self.storage.digest)
        if problem := _contradiction(found, step_of(self.name)):
            raise CheckpointDamaged(f"{where} is damaged: {problem}.")
        return found

    @property
    def digest(self) -> Digest:
        """How its bytes are hashed."""
        return self.storage.digest.named(self.manifest.digest)

    def reader(self, file: str) -> BlockReader:
        """The bytes of one of its files, each checked before it is handed out."""
        if file not in self.manifest.files:
            raise CheckpointError(f"{self.path} has no file {file!r}.")
        path = f"{self.name}/{file}"
        return BlockReader(self.storage, path, self.manifest.files[file], self.digest)

    def damages(
        self,
        progress: Callable[[int], None] | None = None,
        files: Collection[str] | None = None,
    ) -> list[Damage]:
        """Everything wrong with it, by reading and hashing every byte; an empty list is a promise.

        ``files`` narrows it to some of its files (so that ranks can share the work). ``progress``
        is called with the number of bytes checked since the last call, from one thread at a time.
        """
        try:
            entries = self.manifest.files
        except KeyNeeded:
            raise
        except StorageError as error:
            if not error.unreadable:
                raise
            return [Damage(MANIFEST, str(error))]
        except CheckpointError as error:
            return [Damage(MANIFEST, str(error))]
        chosen = [file for file in entries if files is None or file in files]
        turn, stopped = threading.Lock(), threading.Event()

        def report(count: int) -> None:
            if stopped.is_set():
                raise CheckpointError("another thread failed.")  # nobody waits for this any more
            if progress is not None:
                with turn:
                    progress(count)

        def check(file: str) -> list[Damage]:
            path = f"{self.name}/{file}"
            return file_damages(self.storage, path, file, entries[file], report, self.digest)

        with ThreadPoolExecutor(max(1, min(len(chosen), os.cpu_count() or 1, 8))) as pool:
            checks = [pool.submit(check, file) for file in chosen]
            try:
                done = wait(checks, return_when=FIRST_EXCEPTION).done
                found = {one: one.result() for one in done}
            except BaseException:  # such as Ctrl-C: a large file takes long to the end
                stopped.set()
                raise
        return [damage for one in checks for damage in found[one]]

    def read_object(self, name: str) -> Any:
        """One of the plain values saved under ``objects``. Executes no code from the file."""
        entry = self.manifest.objects.get(name)
        if entry is None:
            raise CheckpointError(
                f"{self.path} holds no object {name!r}; it has "
                f"{', '.join(sorted(self.manifest.objects)) or 'none'}."
            )
        with self._reading(entry.file) as reader, _memory_for(f"object {name!r} of {self.path}"):
            data = reader.read(entry.start, entry.length)
        try:
            return torch.load(_uncompressed(data), map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises whatever it trips over
            raise CheckpointError(
                f"object {name!r} of {self.path} cannot be loaded without executing code from the "
                f"file, or was not made by torch.save: {type(error).__name__}."
            ) from error

    def read_tensor(self, name: str) -> Tensor:
        """A whole tensor, on the CPU, whichever ranks saved what of it."""
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} holds no tensor {name!r}.")
        self._check_stored(name, entry)
        with _memory_for(f"{name!r} of {self.path}"):
            result = empty_tensor(entry.shape, dtype_of(entry))
            there = torch.zeros(entry.shape, dtype=torch.bool)
        for stored in entry.stored:
            part = result[stored.box.slices()]
            target = part if part.is_contiguous() else empty_tensor(part.shape, part.dtype)
            if target.nbytes != stored.length:
                raise CheckpointError(
                    f"{name!r} of {self.path}: {stored.length} bytes for elements that take "
                    f"{target.nbytes}."
                )
            with self._reading(stored.file) as reader:
                reader.read_into(stored.start, memory_of(target))
            if target is not part:
                part.copy_(target)
            there[stored.box.slices()] = True
        if missing := there.numel() - int(there.sum()):
            raise self._lacks(name, missing, there.numel())
        return result

    def _check_stored(self, name: str, entry: TensorEntry) -> None:
        """Before memory is taken for a tensor: are there as many bytes as it is said to have?"""
        elements = math.prod(entry.shape)
        stored = sum(one.box.size for one in entry.stored)
        if stored < elements:
            raise self._lacks(name, elements - stored, elements)
        for file in sorted({one.file for one in entry.stored}):
            with self._reading(file):
                pass  # of the size that the manifest says, or this raises

    def _lacks(self, name: str, missing: int, elements: int) -> CheckpointError:
        return CheckpointError(
            f"{self.path} lacks {missing} of the {elements} elements of {name!r}."
        )

    @contextmanager
    def kept_open(self) -> Iterator[Checkpoint]:
        """Inside, files stay open between reads: for reading many small things. For one thread."""
        self._open = OrderedDict()
        try:
            yield self
        finally:
            for reader in self._open.values():
                reader.close()
            self._open = None

    @contextmanager
    def _reading(self, file: str) -> Iterator[BlockReader]:
        if self._open is None:
            with self.reader(file) as reader:
                yield reader
            return
        if file not in self._open:
            self._open[file] = self.reader(file)
        self._open.move_to_end(file)
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)[1].close()
        yield self._open[file]


@contextmanager
def _memory_for(what: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # the latter is how torch says it
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"there is not enough memory for {what}.") from error


def _uncompressed(data: bytearray) -> io.BytesIO:
    """The bytes of an object; one whose parts are larger than it is would fill the memory."""
    file = io.BytesIO(data)
    with zipfile.ZipFile(file) as archive:
        if sum(part.file_size for part in archive.infolist()) > len(data):
            raise ValueError("its parts are compressed")
    file.seek(0)
    return file


def _contradiction(found: Manifest, step: int | None) -> str | None:
    """How a manifest with the right hash still cannot be that of its folder."""
    if step is not None and found.step != step:
        return f"it is that of another checkpoint: expected step {step}, found step {found.step}"
    for name, entry in found.files.items():
        if name in ("", MANIFEST) or name.startswith(".") or {*name} & {*"/\\\0"}:
            return f"file name {name!r} does not stay in this folder"
        if entry.block < 1 or len(entry.hashes) != -(-entry.size // entry.block):
            return f"{name} of {entry.size} bytes has {len(entry.hashes)} hashes"
    places: list[tuple[str, Stored | ObjectEntry]] = [*found.objects.items()]
    places += [(name, stored) for name, t in found.tensors.items() for stored in t.stored]
    for name, place in places:
        if place.file not in found.files:
            return f"{name!r} is said to be in {place.file!r}, which is not one of its files"
        if min(place.start, place.length) < 0 or (
            place.start + place.length > found.files[place.file].size
        ):
            return f"{name!r} is said to be beyond the end of {place.file}"
    return None
