"""Finding a snapshot in memory: what nodes still hold of it, and whether that is all of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from paceline.checkpoint.block_reader import file_damages
from paceline.checkpoint.hashing import XXH3, Digest
from paceline.checkpoint.manifest import Manifest, TensorEntry
from paceline.checkpoint.memory.checkpoint import FileSource, MemoryCheckpoint
from paceline.checkpoint.memory.nodes import MemoryNodes, find_nodes
from paceline.checkpoint.memory.open_files import OpenFiles
from paceline.checkpoint.memory.segment_files import (
    OWN,
    ROOT,
    Header,
    file_name,
    folder_of,
    headers_in,
    read_index,
)
from paceline.checkpoint.memory.transfer_plan import merged
from paceline.checkpoint.sharded import agreement
from paceline.errors import CheckpointError

OWN_MEMORY, PARTNER_MEMORY = "own memory", "partner memory"
_SHOWN = 3


@dataclass(frozen=True)
class HeldSegment:
    """A segment that a node holds."""

    node: int
    header: Header

    @property
    def rank(self) -> int:
        """Whose share of the snapshot it is."""
        return self.header.name.rank

    @property
    def is_own(self) -> bool:
        """Whether it is on the node that wrote it."""
        return self.header.name.kind == OWN


@dataclass(frozen=True)
class _Checked:
    """What looking at a segment found: a problem, or its tensors and objects."""

    problem: str | None
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class HeldSnapshot:
    """A snapshot of which nodes hold segments; ``open`` checks whether they are all of it."""

    step: int
    ranks: int
    offers: tuple[HeldSegment, ...]
    folder: Path
    nodes: MemoryNodes
    digest: Digest = XXH3

    @property
    def has_copies(self) -> bool:
        """Whether there are copies on partners' nodes."""
        return not all(offer.is_own for offer in self.offers)

    def open(self, *, copies: bool = True) -> MemoryCheckpoint:
        """Check every byte of it, each node what it holds. A collective.

        Raises ``CheckpointError`` on all ranks alike where it is not whole. ``copies=False`` does
        without the copies on partners' nodes.
        """
        offers = sorted(
            (offer for offer in self.offers if copies or offer.is_own),
            key=lambda offer: (offer.rank, not offer.is_own, offer.node),
        )
        self._require_all(offers, [])
        checked = self._check(offers)
        good = [(o, found) for o, found in zip(offers, checked, strict=True) if not found.problem]
        problems = [found.problem for found in checked if found.problem]
        self._require_all([offer for offer, _ in good], problems)
        first: dict[int, tuple[HeldSegment, _Checked]] = {}
        for offer, found in good:
            first.setdefault(offer.rank, (offer, found))
        header = first[0][0].header.manifest
        manifest = Manifest(self.step, header.info, digest=header.digest)
        objects: dict[str, bytes] = {}
        for offer, found in first.values():
            manifest.files |= offer.header.manifest.files
            objects |= found.objects
        manifest.tensors = merged([found.tensors for _, found in first.values()])
        own = all(offer.is_own for offer, _ in first.values())
        return MemoryCheckpoint(
            manifest,
            objects,
            self._sources([offer for offer, _ in good]),
            rung=OWN_MEMORY if own else PARTNER_MEMORY,
            folder=self.folder,
            nodes=self.nodes,
            digest=self.digest,
        )

    def _require_all(self, offers: Sequence[HeldSegment], problems: Sequence[str]) -> None:
        """Raise unless there is a segment of every rank."""
        there = {offer.rank for offer in offers}
        lost = [file_name(rank) for rank in range(self.ranks) if rank not in there]
        if lost:
            more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
            why = " ".join(problems[:_SHOWN]) or "no node holds it."
            raise CheckpointError(
                f"the snapshot in memory of step {self.step} lacks {', '.join(lost[:_SHOWN])}"
                f"{more}: {why}"
            )

    def _check(self, offers: Sequence[HeldSegment]) -> list[_Checked]:
        """What is in each of ``offers``: looked at by one rank on its node, known to all."""
        mine = {
            number: _look(self.folder, offer.header, self.digest)
            for number, offer in enumerate(offers)
            if self.nodes.is_mine(offer.node, number)
        }
        found: dict[int, _Checked] = {}
        for theirs in agreement.all_gather(mine, self.nodes.group):
            found |= theirs
        return [found[number] for number in range(len(offers))]

    def _sources(self, good: Sequence[HeldSegment]) -> dict[str, FileSource]:
        sources: dict[str, FileSource] = {}
        for offer in good:
            file = file_name(offer.rank)
            known = sources.get(file, FileSource((), None))
            path = known.path
            if path is None and offer.node == self.nodes.here:
                path = self.folder / f"{offer.header.name}.bin"
            sources[file] = FileSource((*known.nodes, offer.node), path)
        return sources


def snapshots_in_memory(
    run: str | os.PathLike[str],
    group: dist.ProcessGroup | None,
    *,
    identity: str = "",
    root: str | os.PathLike[str] = ROOT,
    on_problem: Callable[[str], None] | None = None,
    digest: Digest = XXH3,
) -> list[HeldSnapshot]:
    """The snapshots of a run of which any node holds a segment, newest first. A collective.

    Segments that cannot be read, or are of another run (see ``MemorySnapshots``), are reported to
    ``on_problem``, on every rank; so is a folder that is not this user's alone, which is not read.
    """
    folder = folder_of(run, root)
    nodes = find_nodes(root, group)
    mine: tuple[list[Header], list[str]] = ([], [])
    if nodes.is_first_here:
        mine = headers_in(folder, identity, digest)
    offers: dict[tuple[int, str], list[HeldSegment]] = {}
    for rank, (headers, problems) in enumerate(agreement.all_gather(mine, group)):
        node = next(number for number, ranks in enumerate(nodes.ranks) if rank in ranks)
        for header in headers:
            offers.setdefault((header.step, header.snapshot), []).append(HeldSegment(node, header))
        for problem in problems if on_problem is not None else ():
            assert on_problem is not None
            on_problem(problem)
    return [
        HeldSnapshot(step, held[0].header.ranks, tuple(held), folder, nodes, digest)
        for (step, _), held in sorted(offers.items(), reverse=True)
    ]


def _look(folder: Path, header: Header, digest: Digest) -> _Checked:
    """Check a segment of this node, and take out what all ranks should know of it."""
    path = f"{header.name}.bin"
    entry = header.manifest.files[file_name(header.name.rank)]
    kind = digest.named(header.manifest.digest)
    storage = OpenFiles(str(folder))
    try:
        tensors = read_index(folder, header, digest).tensors
        storage.add(path, folder / path, entry.size)
        for damage in file_damages(storage, path, storage.full(path), entry, lambda _: None, kind):
            return _Checked(str(damage))
        objects: dict[str, bytes] = {}
        with storage.open_read(path) as file:
            for name, place in header.manifest.objects.items():
                data = bytearray(place.length)
                file.read_into(place.start, memoryview(data))
                objects[name] = bytes(data)
        return _Checked(None, tensors, objects)
    except CheckpointError as error:
        return _Checked(str(error))
    finally:
        storage.close()
