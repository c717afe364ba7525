"""Writing a checkpoint: each rank its own file, hashed on the way; last of all the manifest."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from paceline.checkpoint.block_reader import file_damages
from paceline.checkpoint.boxes import Box
from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.hashing import BlockHasher, FileEntry, hashed
from paceline.checkpoint.manifest import MANIFEST, Manifest, ObjectEntry, Stored, TensorEntry
from paceline.checkpoint.sharded.dcp_errors import sendable_errors
from paceline.checkpoint.sharded.save_plan import Tensors, aligned, box_of, bytes_of
from paceline.checkpoint.storage.local import LocalStorage
from paceline.checkpoint.tensor_bytes import flat, memory_of
from paceline.errors import CheckpointError


@dataclass(frozen=True)
class WrittenFile:
    """What a rank reports of its file: its entry in the manifest, and what it holds.

    Boxes are given as name, offset, shape, start and length; objects as name, start and length.
    """

    entry: FileEntry
    boxes: list[tuple[str, tuple[int, ...], tuple[int, ...], int, int]]
    objects: list[tuple[str, int, int]]


class StateWriter(StorageWriter):
    """Writes the checkpoint of ``step``; ``info`` counts on rank 0, where the manifest is made.

    ``check_lock`` raises where the folder is another run's by now.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        step: int,
        info: dict[str, Any],
        *,
        read_back: bool,
        check_lock: Callable[[], None] = lambda: None,
    ) -> None:
        self._checkpoint = checkpoint
        self._storage = checkpoint.storage
        self._step = step
        self._info = info
        self._read_back = read_back
        self._check_lock = check_lock
        self._token = ""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the coordinator is who is asked to prepare and to finish."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    @sendable_errors
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder and give each rank the name of its file."""
        try:
            json.dumps(self._info)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the info of the checkpoint cannot be written as JSON: {error}. Nothing was "
                "written."
            ) from error
        self._check_lock()  # what looks unfinished may be the other run's save in progress
        name = self._checkpoint.name
        if not self._has_manifest():  # what a save left that was never finished
            self._storage.delete_folder(name)
        self._storage.make_folder(name)
        self._token = secrets.token_hex(4)
        return [
            dataclasses.replace(plan, storage_data=f"rank-{rank:05d}-{self._token}.bin")
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; a rank with nothing to write has none."""
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._write(plan, planner) if plan.items else [])
        return future

    @sendable_errors
    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        file: str = plan.storage_data
        path = f"{self._checkpoint.name}/{file}"
        self._check_shared()
        placed = list(_placed(plan.items))
        hasher = BlockHasher(digest=self._storage.digest)
        self._storage.create(path, hashed(_chunks(placed, planner), hasher))
        entry = hasher.digests()
        self._check_written(path, entry)
        written = WrittenFile(entry, [], [])
        for item, start in placed:
            name, length = item.index.fqn, bytes_of(item)
            if item.tensor_data is None:
                written.objects.append((name, start, length))
            else:
                box = box_of(item)
                written.boxes.append((name, box.offset, box.shape, start, length))
        return [WriteResult(MetadataIndex(file), entry.size, written)]

    def _check_shared(self) -> None:
        """Raise where this rank does not see the folder that the first rank has just made."""
        storage = self._storage
        if (
            isinstance(storage, LocalStorage)
            and not (storage.root / self._checkpoint.name).is_dir()
        ):
            raise CheckpointError(
                f"{self._checkpoint.path}, which rank 0 has made, is not there on "
                f"{socket.gethostname()}. All ranks must save to one place: choose a folder on a "
                "file system that all machines share, or a URL such as s3://bucket/folder. Earlier "
                "checkpoints are untouched."
            )

    def _check_written(self, path: str, entry: FileEntry) -> None:
        """Read the file back: what replaces an older checkpoint must be known to be good."""
        if not self._read_back:
            return
        if isinstance(self._storage, LocalStorage):
            damages = file_damages(
                self._storage,
                path,
                self._storage.full(path),
                entry,
                lambda _: None,
                self._storage.digest,
            )
            problem = str(damages[0]) if damages else ""
        else:  # a remote storage checks what it was sent; all of it would have to come back
            size = self._storage.size(path)
            problem = f"expected {entry.size} bytes, found {size}." if size != entry.size else ""
        if problem:
            raise CheckpointError(
                f"{self._storage.full(path)} does not read back as it was written: {problem} The "
                "disk, its driver or the memory is at fault. Earlier checkpoints are untouched."
            )

    @sendable_errors
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: write the manifest, then delete what belongs to none."""
        written = {r.index.fqn: r.storage_data for by_rank in results for r in by_rank}
        made = make_manifest(self._step, self._info, metadata.planner_data, written)
        folder = self._checkpoint.name
        self._check_lock()
        self._storage.replace(f"{folder}/{MANIFEST}", made.to_bytes(self._storage.digest))
        metadata.planner_data, metadata.storage_data = None, made.size  # all ranks get to know
        # From here on it is saved, whatever happens.
        with suppress(CheckpointError):
            for name in self._storage.names(folder):
                if name != MANIFEST and name not in made.files:
                    self._storage.delete(f"{folder}/{name}")

    def abandon(self) -> None:
        """After all ranks have failed: free the space of what they wrote. For the coordinator."""
        if not self._token:
            return
        folder = self._checkpoint.name
        with suppress(CheckpointError):  # why the save failed is what is reported
            if self._has_manifest():
                known = self._storage.read_bytes(f"{folder}/{MANIFEST}")
                if self._token.encode() in known:
                    return
            found = self._storage.names(folder)
            own = [name for name in found if name.endswith(f"-{self._token}.bin")]
            for name in own:
                self._storage.delete(f"{folder}/{name}")
            if found == own:  # else there is an earlier checkpoint, or another run took over
                self._storage.delete_folder(folder)

    def _has_manifest(self) -> bool:
        return self._storage.size(f"{self._checkpoint.name}/{MANIFEST}") is not None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Not to be chosen by a path: it is made for one checkpoint."""
        return False


def make_manifest(
    step: int, info: dict[str, Any], tensors: Tensors, written: Mapping[str, WrittenFile]
) -> Manifest:
    """All tensors that the ranks know, and what they have ``written``, by the names of files."""
    made = Manifest(step, info)
    stored: dict[str, list[Stored]] = {name: [] for name in tensors}
    for file, own in written.items():
        made.files[file] = own.entry
        for name, offset, lengths, start, size in own.boxes:
            stored[name].append(Stored(Box(offset, lengths), file, start, size))
        for name, start, size in own.objects:
            made.objects[name] = ObjectEntry(file, start, size)
    for name, (shape, dtype) in tensors.items():
        boxes = tuple(sorted(stored[name], key=lambda one: one.box.offset))
        made.tensors[name] = TensorEntry(shape, str(dtype).removeprefix("torch."), boxes)
    return made


def _placed(items: Sequence[WriteItem]) -> Iterator[tuple[WriteItem, int]]:
    """The items with where in the file each begins."""
    start = 0
    for item in items:
        yield item, start
        start = aligned(start + bytes_of(item))


def _chunks(placed: Sequence[tuple[WriteItem, int]], planner: SavePlanner) -> Iterator[memoryview]:
    """The bytes of the file, one item after the other."""
    end = 0
    for item, start in placed:
        if start > end:
            yield memoryview(bytes(start - end))
        data = planner.resolve_data(item)
        view = data.getbuffer() if isinstance(data, io.BytesIO) else _dense(data)
        if len(view) != bytes_of(item):
            raise CheckpointError(
                f"{item.index.fqn!r} has {len(view)} bytes where {bytes_of(item)} were planned."
            )
        yield view
        end = start + len(view)


def _dense(tensor: Tensor) -> memoryview:
    """The elements of ``tensor``, row by row: its own memory where that holds them so."""
    return memory_of(flat(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()))
