"""PartnerCopies of a snapshot on another node: how the bytes get there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.memory.shared_memory import Slots
from paceline.checkpoint.sharded.agreement import explained_timeout
from paceline.checkpoint.tensor_bytes import memory_of
from paceline.errors import CheckpointError

_CHUNK = 256 * 1024 * 1024


class PartnerCopies:
    """The copies that this rank sends to the rank ``to``, and those it keeps for others."""

    def __init__(
        self, group: dist.ProcessGroup | None, to: int | None, kept: Sequence[Slots]
    ) -> None:
        self.kept = list(kept)
        self._group = group
        self._to = to

    def trade(self, header: bytes, index: bytes, body: Tensor) -> list[str]:
        """Send this rank's segment and take in those of others; every rank does so at one time.

        Without a ``header`` there is none to send. Returns a sentence on each that was refused.
        """
        if self._group is None or (self._to is None and not self.kept):
            return []
        outgoing = None
        if self._to is not None:
            outgoing = Outgoing(self._to, [as_tensor(header), as_tensor(index), body])
            if not header:
                outgoing = Outgoing(self._to, [])
        arriving = [_ArrivingCopy(slots) for slots in self.kept]
        incoming = [Incoming(one.slots.rank, one.room) for one in arriving]
        with explained_timeout("sending a snapshot to another node"):
            problems = exchange(self._group, outgoing, incoming, parts=3)
        for one in arriving:
            one.commit()
        return problems


class _ArrivingCopy:
    """A copy on its way to its segment."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._texts: list[Tensor] = []

    def room(self, sizes: Sequence[int]) -> Sequence[Tensor]:
        segment = self.slots.spare
        segment.clear()
        segment.reserve(sizes[2])
        self._texts = [torch.empty(size, dtype=torch.uint8) for size in sizes[:2]]
        return [*self._texts, segment.memory[: sizes[2]]]

    def commit(self) -> None:
        if self._texts:
            header, index = (bytes(memory_of(text)) for text in self._texts)
            self.slots.spare.put_index(index)
            self.slots.spare.commit(header)


@dataclass(frozen=True)
class Outgoing:
    """Bytes (uint8, one after the other) for the rank ``to``; none where there is nothing."""

    to: int
    parts: Sequence[Tensor]


@dataclass(frozen=True)
class Incoming:
    """What the rank ``source`` will send: ``room`` gives memory for parts of these sizes.

    It may refuse by a ``CheckpointError``: then nothing is sent.
    """

    source: int
    room: Callable[[Sequence[int]], Sequence[Tensor]]


def exchange(
    group: dist.ProcessGroup, outgoing: Outgoing | None, incoming: Sequence[Incoming], parts: int
) -> list[str]:
    """Send and receive; returns a sentence on each transfer that was refused, here or there.

    Every sender and receiver must call it at the same time; a message has at most ``parts`` parts.
    """
    problems: list[str] = []
    # Receives are posted before sends: Gloo would serialise the two directions otherwise.
    announced = [torch.zeros(parts, dtype=torch.int64) for _ in incoming]
    waiting = [
        dist.irecv(t, group=group, group_src=i.source)
        for t, i in zip(announced, incoming, strict=True)
    ]
    if outgoing is not None:
        sizes = torch.zeros(parts, dtype=torch.int64)
        for number, part in enumerate(outgoing.parts):
            sizes[number] = part.numel()
        waiting.append(dist.isend(sizes, group=group, group_dst=outgoing.to))
    _finish(waiting)

    rooms: list[Sequence[Tensor]] = []
    answers = [torch.ones(1, dtype=torch.int32) for _ in incoming]
    for sizes, each, answer in zip(announced, incoming, answers, strict=True):
        try:
            rooms.append(each.room(sizes.tolist()) if sizes.any() else [])
        except CheckpointError as error:
            rooms.append([])
            answer.zero_()
            problems.append(f"the copy of rank {each.source} was refused: {error}")
    accepted = torch.ones(1, dtype=torch.int32)
    waiting = [] if outgoing is None else [dist.irecv(accepted, group=group, group_src=outgoing.to)]
    waiting += [
        dist.isend(a, group=group, group_dst=i.source)
        for a, i in zip(answers, incoming, strict=True)
    ]
    _finish(waiting)

    waiting = [
        dist.irecv(chunk, group=group, group_src=each.source)
        for room, each in zip(rooms, incoming, strict=True)
        for chunk in _chunks(room)
    ]
    if outgoing is not None and accepted.item():
        waiting += [
            dist.isend(c, group=group, group_dst=outgoing.to) for c in _chunks(outgoing.parts)
        ]
    _finish(waiting)
    return problems


def _chunks(parts: Sequence[Tensor]) -> list[Tensor]:
    return [chunk for part in parts for chunk in part.split(_CHUNK) if chunk.numel()]


def _finish(waiting: Sequence[dist.Work | None]) -> None:
    for work in waiting:
        assert work is not None  # every rank that gets here is a member of the group
        work.wait()


def as_tensor(data: bytes) -> Tensor:
    """A copy of ``data`` as bytes of torch's."""
    tensor = torch.empty(len(data), dtype=torch.uint8)
    if data:
        memory_of(tensor)[:] = data
    return tensor
