"""The state of a run in shared memory: as often as at every step, for when a process dies.

Every rank copies what it would write to a checkpoint into memory that outlives it, in two slots
used in turn: the snapshot before stays whole until the new one is whole on every rank. A thread
hashes the copy, makes it count, and sends it to a rank on another node.
"""

from __future__ import annotations

import functools
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.hashing import BLOCK, XXH3, Digest, FileEntry, hash_blocks
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.memory.background_thread import BackgroundThread
from paceline.checkpoint.memory.nodes import MemoryNodes, find_nodes, partners
from paceline.checkpoint.memory.partner_copies import PartnerCopies, as_tensor
from paceline.checkpoint.memory.segment_files import (
    COPY,
    OWN,
    ROOT,
    file_name,
    folder_of,
    make_folder,
    make_header,
    names_in,
    remove_fetched,
    remove_files,
    remove_folder,
    remove_temporary,
    step_in,
)
from paceline.checkpoint.memory.shared_memory import Segment, Slots
from paceline.checkpoint.rank_state import RankState
from paceline.checkpoint.sharded import agreement
from paceline.checkpoint.sharded.host_copy import copy_all
from paceline.checkpoint.sharded.write_share import (
    WriteShare,
    check_loadable,
    object_texts,
    plan_write_share,
)
from paceline.checkpoint.tensor_bytes import memory_of
from paceline.errors import CheckpointError


@dataclass(frozen=True)
class SnapshotTaken:
    """A snapshot was taken; this rank copied ``bytes``.

    Training stood still for ``seconds``; it ``waited`` for so many of them for the one before.
    """

    seconds: float
    waited: float
    bytes: int


@dataclass(frozen=True)
class _CopiedSnapshot:
    """A snapshot that is copied, and does not count yet."""

    name: str
    manifest: Manifest
    objects: Mapping[str, bytes]
    size: int
    index: bytes


class MemorySnapshots:
    """Snapshots of a run in the shared memory of its nodes. Every rank makes one, together.

    ``run`` is the folder (or URL) that the run is known by; ``identity`` tells apart runs that
    used this folder one after the other. ``after`` is the step that the run goes on from, ``None``
    for one that begins: only a snapshot of that very step is kept until there is a newer one.
    Older ones are of no use, newer ones are of a history that was given up.

    ``group`` must be a Gloo group of all ranks that nothing else uses; ``None`` in a world of one.
    ``digest`` is how the snapshots are hashed.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        group: dist.ProcessGroup | None,
        *,
        after: int | None,
        identity: str = "",
        root: str | os.PathLike[str] = ROOT,
        digest: Digest = XXH3,
    ) -> None:
        self._run, self._root, self._digest = run, root, digest
        self._rank, self._size = agreement.group_rank(group), agreement.group_size(group)
        self._group = group
        self._identity = identity
        self._folder = folder_of(run, root)
        self._nodes = self._meet()
        chosen = partners(self._nodes.ranks)
        self.partner = chosen[self._rank]
        """The rank that keeps a copy of this rank's snapshots; ``None`` on a single node."""
        keep = None if after is None else (after, identity)
        self._own = Slots(self._folder, self._rank, OWN, keep, digest)
        kept = [rank for rank, keeper in enumerate(chosen) if keeper == self._rank]
        slots = [Slots(self._folder, rank, COPY, keep, digest) for rank in kept]
        self._copies = PartnerCopies(group, self.partner, slots)
        here = self._nodes.ranks[self._nodes.here]
        self._used_here = {(rank, OWN) for rank in here}
        self._used_here |= {(rank, COPY) for rank, keeper in enumerate(chosen) if keeper in here}
        if self._nodes.is_first_here:  # nobody writes before all ranks have come to the end of this
            remove_fetched(self._folder)
            remove_temporary(self._folder)
            self._sweep(keep)
        self._has_strays = True
        self._share: WriteShare | None = None
        self._views: dict[Segment, tuple[Tensor, list[Tensor]]] = {}
        self._worker = BackgroundThread()
        self._in_flight = False
        self._problem: str | None = None
        self._count = 0
        self._token = agreement.all_gather(secrets.token_hex(4), group)[0]
        self._closed = False

    @property
    def note(self) -> str | None:
        """What a person should know of the copies; ``None`` where there are copies."""
        if self.partner is not None:
            return None
        return (
            "All ranks share the memory of one node: its snapshots survive the death of processes, "
            "not that of the node."
        )

    def snapshot(
        self, step: int, state: RankState, info: Mapping[str, Any] | None = None
    ) -> SnapshotTaken:
        """Copy ``state`` into memory. A collective; it returns when the copy is made.

        Waits for the snapshot before, where that is not through yet. Whatever goes wrong, with
        this one or with the one before since, raises ``CheckpointError`` on every rank alike; the
        newest snapshot that is whole stays.
        """
        if self._closed:
            raise CheckpointError("snapshot(): this MemorySnapshots is closed. Make a new one.")
        began = time.perf_counter()
        self._worker.wait()
        waited = time.perf_counter() - began
        objects, problem = object_texts(state.objects)
        share = self._make_ready(step, state, objects, problem)
        # From here on nobody stops half way: what fails on this rank, all hear of at the next call.
        self._count += 1
        taken, problem = None, None
        try:
            taken = self._copy(step, state, objects, dict(info or {}), share)
        except CheckpointError as error:
            problem = f"the snapshot in memory of step {step} failed: {error}"
        self._in_flight = True
        self._worker.begin(functools.partial(self._finish, taken, problem))
        size = 0 if taken is None else taken.size
        return SnapshotTaken(time.perf_counter() - began, waited, size)

    def wait(self) -> None:
        """Return when the newest snapshot counts and its copy is on the partner's node."""
        self._worker.wait()
        if self._problem is not None:
            raise CheckpointError(self._problem)

    def close(self) -> None:
        """Wait, and let go of the memory. What it holds stays, for a process that comes after."""
        try:
            self.wait()
        finally:
            self._release()

    def free(self) -> None:
        """Give this rank's memory back to the system; the last rank of a node removes the folder.

        For a run that ended well. Every rank calls it; they need not wait for each other.
        """
        self._worker.wait()
        if self._nodes.is_first_here:
            self._sweep(None)
        for segment in self._segments():
            segment.remove()
        self._release()
        remove_folder(self._folder)

    def _release(self) -> None:
        self._closed = True
        self._worker.end()
        self._views.clear()
        for segment in self._segments():
            segment.close()

    def _segments(self) -> list[Segment]:
        return [segment for slots in (self._own, *self._copies.kept) for segment in slots.both]

    def _meet(self) -> MemoryNodes:
        """Make the folder, and find out who else is here."""
        problem = None
        try:
            make_folder(self._run, self._root)
        except CheckpointError as error:
            problem = str(error)
        return find_nodes(self._root, self._group, problem)

    def _sweep(self, keep: tuple[int, str] | None) -> None:
        """Remove what ranks that are not here any more left, but for the snapshot to ``keep``."""
        for name in names_in(self._folder):
            if (name.rank, name.kind) in self._used_here:
                continue
            if keep is None or step_in(self._folder, name, keep[1], self._digest) != keep[0]:
                remove_files(self._folder, name)

    def _make_ready(
        self, step: int, state: RankState, objects: Mapping[str, bytes], problem: str | None
    ) -> WriteShare:
        """Agree that all ranks can go on; have a plan, and room in the segment to write."""
        share = self._share
        if share is not None and not share.fits(state):
            share = None
        target = self._own.other if self._in_flight else self._own.spare
        crowded = share is not None and not target.has_room(share.place(objects)[1])
        flags = [share is None, crowded, problem is not None, self._problem is not None]
        changed, crowded, refused, failed = agreement.any_of(flags, self._group)
        if self._in_flight and not failed:
            self._count_as_whole()
        self._in_flight = False
        if refused or failed:
            self._give_up(problem)
        if changed:
            share, problem = plan_write_share(step, state, file_name(self._rank), self._group)
            if problem is not None:
                raise CheckpointError(problem)
            self._views.clear()
            self._share = share
        assert share is not None
        if changed or crowded:
            try:
                make_folder(self._run, self._root)
                self._own.spare.reserve(share.place(objects)[1], pin=share.on_cuda)
            except CheckpointError as error:
                problem = str(error)
            agreement.raise_on_all(problem, self._group)
        return share

    def _copy(
        self,
        step: int,
        state: RankState,
        objects: Mapping[str, bytes],
        info: dict[str, Any],
        share: WriteShare,
    ) -> _CopiedSnapshot:
        segment = self._own.spare
        segment.clear()
        segment.put_index(share.index)
        copy_all(share.sources(state), self._views_of(segment, share))
        entries, size = share.place(objects)
        for name, entry in entries.items():
            segment.memory[entry.start : entry.start + entry.length] = as_tensor(objects[name])
        manifest = Manifest(step, info, objects=entries)
        return _CopiedSnapshot(f"{self._token}-{self._count}", manifest, objects, size, share.index)

    def _count_as_whole(self) -> None:
        """The snapshot before is whole on all ranks: what was there before it may go."""
        for slots in (self._own, *self._copies.kept):
            slots.turn()
        if self._has_strays and self._nodes.is_first_here:
            self._sweep(None)
        self._has_strays = False

    def _give_up(self, problem: str | None) -> None:
        """Some rank cannot go on: say which, everywhere."""
        mine = self._problem or problem
        if self._problem is not None:  # begin anew: files may have been taken from under us
            for segment in self._segments():
                segment.close()
            self._views.clear()
        self._problem = None
        raise CheckpointError(
            agreement.joined_problems(agreement.all_gather(mine, self._group)) or ""
        )

    def _views_of(self, segment: Segment, share: WriteShare) -> Sequence[Tensor]:
        memory, views = self._views.get(segment, (None, []))
        if memory is not segment.memory:
            views = share.views(segment.memory)
            self._views[segment] = segment.memory, views
        return views

    def _finish(self, taken: _CopiedSnapshot | None, problem: str | None) -> None:
        """What the thread does: hash, commit, and trade copies with other nodes."""
        header, index, body = b"", b"", torch.empty(0, dtype=torch.uint8)
        problems = [] if problem is None else [problem]
        try:
            if taken is not None:
                header = self._commit(taken)
                index, body = taken.index, self._own.spare.memory[: taken.size]
        except Exception as error:  # reported by the next call: partners must not wait for us
            problems.append(_sentence(error, taken))
        try:
            refused = self._copies.trade(header, index, body)
            problems += [_sentence(CheckpointError(text), taken) for text in refused]
        except Exception as error:
            problems.append(_sentence(error, taken))
        self._problem = " ".join(problems) or None

    def _commit(self, taken: _CopiedSnapshot) -> bytes:
        for name, data in taken.objects.items():
            check_loadable(name, data)
        segment = self._own.spare
        body = memory_of(segment.memory[: taken.size]) if taken.size else b""
        hashes = hash_blocks(body, digest=self._digest)
        taken.manifest.files[file_name(self._rank)] = FileEntry(taken.size, hashes, BLOCK)
        header = make_header(
            taken.manifest,
            snapshot=taken.name,
            ranks=self._size,
            identity=self._identity,
            index=taken.index,
            digest=self._digest,
        )
        segment.commit(header)
        return header


def _sentence(error: Exception, taken: _CopiedSnapshot | None) -> str:
    step = "" if taken is None else f" of step {taken.manifest.step}"
    text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return f"the snapshot in memory{step} failed: {text}"
