"""A snapshot in memory as a checkpoint: it loads at any layout, like one on disk."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.hashing import XXH3, BlockHasher, Digest
from paceline.checkpoint.manifest import Manifest, ObjectEntry, name_of
from paceline.checkpoint.memory.nodes import MemoryNodes
from paceline.checkpoint.memory.open_files import OpenFiles
from paceline.checkpoint.memory.segment_files import fetched_path
from paceline.checkpoint.memory.transfer_plan import Blocks, Transfer, needed, transfers
from paceline.checkpoint.rank_state import Part
from paceline.checkpoint.sharded import agreement
from paceline.checkpoint.sharded.save_load import load
from paceline.checkpoint.storage.os_errors import explained
from paceline.checkpoint.tensor_bytes import memory_of
from paceline.errors import CheckpointError

_OBJECTS = "objects.bin"


@dataclass(frozen=True)
class FileSource:
    """Where the bytes of a file are: the nodes that hold it, and its path if this one does."""

    nodes: tuple[int, ...]
    path: Path | None


class MemoryCheckpoint(Checkpoint):
    """A whole snapshot in the memory of nodes, all of it checked. Close it when it is loaded.

    Objects can be read at once. Tensors need ``load``, which brings to this node what it
    lacks of them. ``rung`` says whether it took a partner's copy to make it whole.
    """

    def __init__(
        self,
        manifest: Manifest,
        objects: Mapping[str, bytes],
        sources: Mapping[str, FileSource],
        *,
        rung: str,
        folder: Path,
        nodes: MemoryNodes,
        digest: Digest = XXH3,
    ) -> None:
        self._files = OpenFiles(f"memory:{folder}", digest)
        super().__init__(self._files, name_of(manifest.step))
        self.rung = rung
        self._folder = folder
        self._nodes = nodes
        self._sources = sources
        self._fetched: Blocks = {}
        for file, source in sources.items():
            if source.path is not None:
                self._files.add(f"{self.name}/{file}", source.path, manifest.files[file].size)
        self.manifest = manifest
        self._add_objects(manifest, objects)

    def _add_objects(self, manifest: Manifest, objects: Mapping[str, bytes]) -> None:
        """Objects are known to every rank: as one more file."""
        together = bytearray()
        for name, data in objects.items():
            manifest.objects[name] = ObjectEntry(_OBJECTS, len(together), len(data))
            together += data
        hasher = BlockHasher(digest=self.digest)
        hasher.update(together)
        manifest.files[_OBJECTS] = hasher.digests()
        self._files.add_bytes(f"{self.name}/{_OBJECTS}", bytes(together))

    def load(self, parts: Mapping[str, Part]) -> None:
        """Fill the memory of ``parts``, as ``save_load.load`` does. Called by all ranks."""
        self.bring(parts)
        load(self, parts, self._nodes.group)

    def bring(self, parts: Mapping[str, Part]) -> None:
        """Bring to this node what filling ``parts`` takes and it does not hold. A collective."""
        nodes, files = self._nodes, self.manifest.files
        wanted: Blocks = {}
        for file, blocks in needed(parts, self.manifest).items():
            had = self._fetched.get(file, frozenset())
            if self._sources[file].path is None and blocks - had:
                wanted[file] = blocks | had
        met = agreement.all_gather((wanted, secrets.token_hex(4)), nodes.group)
        holders = {file: source.nodes for file, source in self._sources.items()}
        plan = transfers([theirs for theirs, _ in met], nodes.ranks, holders, files)
        paths = {
            one.file: fetched_path(self._folder, met[0][1], one.file)
            for one in plan
            if one.target in nodes.ranks[nodes.here]
        }
        arriving = _FetchedFiles({f: (path, files[f].size) for f, path in paths.items()})
        try:
            agreement.raise_on_all(self._move(plan, arriving), nodes.group)
            problem = None
            try:
                for file, path in paths.items():
                    self._files.add(f"{self.name}/{file}", path, files[file].size)
            except CheckpointError as error:
                problem = str(error)
            agreement.raise_on_all(problem, nodes.group)
        finally:
            arriving.unlink()  # who has it open keeps it; nothing stays behind whatever happens
        for rank in nodes.ranks[nodes.here]:
            for file, blocks in met[rank][0].items():
                self._fetched[file] = self._fetched.get(file, frozenset()) | blocks

    def _move(self, plan: Sequence[Transfer], arriving: _FetchedFiles) -> str | None:
        """Send and receive as planned, to the end whatever happens, so that nobody waits for us."""
        rank, problem = self._nodes.rank, None
        for one in plan:
            if rank not in (one.source, one.target):
                continue
            data = torch.empty(one.end - one.start, dtype=torch.uint8)
            with agreement.explained_timeout("bringing a snapshot from another node"):
                try:
                    if rank == one.source:
                        self._read(one, data)
                    else:
                        dist.recv(data, group=self._nodes.group, group_src=one.source)
                        arriving.write(one, data)
                except CheckpointError as error:
                    problem = problem or str(error)
                if rank == one.source:
                    dist.send(data, group=self._nodes.group, group_dst=one.target)
        return problem

    def _read(self, one: Transfer, into: Tensor) -> None:
        with self._files.open_read(f"{self.name}/{one.file}") as file:
            file.read_into(one.start, memory_of(into))

    def close(self) -> None:
        """Let go of its memory."""
        self._files.close()


class _FetchedFiles:
    """Files in this node's memory that this rank fills with what others send."""

    def __init__(self, places: Mapping[str, tuple[Path, int]]) -> None:
        self._places = places
        self._open: dict[str, int] = {}

    def write(self, one: Transfer, data: Tensor) -> None:
        path, size = self._places[one.file]
        with explained("write", str(path)):
            if one.file not in self._open:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                self._open[one.file] = os.open(path, flags, 0o600)
                os.ftruncate(self._open[one.file], size)
            view, at = memory_of(data), one.start
            while view:
                written = os.pwrite(self._open[one.file], view, at)
                view, at = view[written:], at + written

    def unlink(self) -> None:
        for file, handle in self._open.items():
            os.close(handle)
            self._places[file][0].unlink(missing_ok=True)
