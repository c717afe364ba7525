"""How the tensors of a process set travel: over Gloo from host memory, over NCCL from a GPU's.

Every call is made by all members in one order, from one thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.compat.horovod.common.reduce_ops import Average, Max, Min, Product, Sum
from paceline.compat.horovod.runtime.arithmetic import combine
from paceline.world.sealing import sealed

Finish = Callable[[torch.Tensor], torch.Tensor]
"""What is done to a reduced piece before it is rounded and handed out."""

_SMALL_BYTES = 32 * 1024
"""Up to here everybody sends everything: one round instead of two."""
_NCCL_OPS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}


class HostChannel:
    """The members' host memory; ``group`` is ``None`` where there is only one."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None) -> None:
        self.rank, self.size, self._group = rank, size, group

    def reduce(self, flat: torch.Tensor, op: int, finish: Finish) -> torch.Tensor:
        """The reduction of all members' ``flat``, the same bits on every one of them."""
        if self.size == 1:
            return finish(combine([flat], op)).to(flat.dtype)
        if flat.numel() * flat.element_size() <= _SMALL_BYTES:
            return finish(combine(self.gather_equal(flat), op)).to(flat.dtype)
        length = -(-flat.numel() // self.size)
        padded = flat.new_zeros(length * self.size)
        padded[: flat.numel()] = flat
        mine = self.reduce_pieces(padded, [length] * self.size, op, finish)
        return torch.cat(self.gather_equal(mine))[: flat.numel()]

    def reduce_pieces(
        self, flat: torch.Tensor, lengths: Sequence[int], op: int, finish: Finish
    ) -> torch.Tensor:
        """The reduction of this member's piece of ``flat``, cut by ``lengths``."""
        mine = lengths[self.rank]
        received = self.exchange(flat, lengths, [mine] * self.size)
        return finish(combine(received.split(mine) if mine else [received], op)).to(flat.dtype)

    def gather_equal(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's ``tensor``; all have the same shape."""
        if self.size == 1:
            return [tensor]
        mine = _bytes(tensor)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        if mine.numel():
            dist.all_gather(parts, mine, group=self._group)
        return [part.view(tensor.dtype).reshape(tensor.shape) for part in parts]

    def gather(self, flat: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Everybody's ``flat``, of the given lengths, one after the other."""
        if len(set(lengths)) == 1:
            return torch.cat(self.gather_equal(flat))
        output = flat.new_empty(sum(lengths))
        pieces = output.split(list(lengths))
        pieces[self.rank].copy_(flat)
        peers = [rank for rank in range(self.size) if rank != self.rank]
        # Receives first: Gloo would otherwise serialise the two directions.
        works = [
            dist.irecv(_bytes(pieces[peer]), group=self._group, group_src=peer)
            for peer in peers
            if lengths[peer]
        ]
        if lengths[self.rank]:
            mine = _bytes(flat)
            works += [dist.isend(mine, group=self._group, group_dst=peer) for peer in peers]
        for work in works:
            assert work is not None
            work.wait()
        return output

    def exchange(
        self, flat: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """Send the i-th piece of ``flat`` to the i-th member; returns what they sent, in order."""
        if self.size == 1:
            return flat.clone()
        width = flat.element_size()
        output = flat.new_empty(sum(received))
        dist.all_to_all_single(
            _bytes(output),
            _bytes(flat),
            [count * width for count in received],
            [count * width for count in sent],
            group=self._group,
        )
        return output

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Overwrite ``flat`` with that of the member ``root``."""
        if self.size > 1 and flat.numel():
            dist.broadcast(_bytes(flat), group=self._group, group_src=root)

    def swap(self, flat: torch.Tensor, peer: int) -> torch.Tensor:
        """What the member ``peer`` has in the place of ``flat``."""
        other = torch.empty_like(flat)
        if flat.numel():
            receive = dist.irecv(_bytes(other), group=self._group, group_src=peer)
            send = dist.isend(_bytes(flat), group=self._group, group_dst=peer)
            assert receive is not None
            assert send is not None
            receive.wait()
            send.wait()
        return other


class GpuChannel:
    """The members' GPUs, over NCCL; work is ordered after that of the current stream."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self._group = rank, size, group

    def reduce(self, flat: torch.Tensor, op: int, finish: Finish) -> torch.Tensor:
        """The reduction of all members' ``flat``."""
        wire = _as_nccl_takes_it(flat, op)
        dist.all_reduce(wire, op=_nccl_op(flat.dtype, op), group=self._group)
        return finish(wire.to(flat.dtype) if flat.dtype == torch.bool else wire).to(flat.dtype)

    def reduce_pieces(
        self, flat: torch.Tensor, lengths: Sequence[int], op: int, finish: Finish
    ) -> torch.Tensor:
        """The reduction of this member's piece of ``flat``, cut by ``lengths``."""
        if len(set(lengths)) > 1:  # NCCL cuts into equal pieces only
            return self.reduce(flat, op, finish).split(list(lengths))[self.rank]
        wire = _as_nccl_takes_it(flat, op)
        mine = wire.new_empty(lengths[self.rank])
        dist.reduce_scatter_tensor(mine, wire, op=_nccl_op(flat.dtype, op), group=self._group)
        return finish(mine).to(flat.dtype)

    def gather(self, flat: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Everybody's ``flat``, of the given lengths, one after the other."""
        output = flat.new_empty(sum(lengths))
        pieces = [_bytes(piece) for piece in output.split(list(lengths))]
        dist.all_gather(pieces, _bytes(flat), group=self._group)
        return output

    def exchange(
        self, flat: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """Send the i-th piece of ``flat`` to the i-th member; returns what they sent, in order."""
        width = flat.element_size()
        output = flat.new_empty(sum(received))
        dist.all_to_all_single(
            _bytes(output),
            _bytes(flat),
            [count * width for count in received],
            [count * width for count in sent],
            group=self._group,
        )
        return output

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Overwrite ``flat`` with that of the member ``root``."""
        if flat.numel():
            dist.broadcast(_bytes(flat), group=self._group, group_src=root)

    def swap(self, flat: torch.Tensor, peer: int) -> torch.Tensor:
        """What the member ``peer`` has in the place of ``flat``."""
        other = torch.empty_like(flat)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, flat, group=self._group, group_peer=peer),
                dist.P2POp(dist.irecv, other, group=self._group, group_peer=peer),
            ]
        )
        for work in works:
            work.wait()
        return other


Channel = HostChannel | GpuChannel


class Channels:
    """The process groups of all process sets, made and destroyed together with their sets."""

    def __init__(self, rank: int, world_ranks: Sequence[int], nccl: bool) -> None:
        self.rank = rank
        self._world_ranks = list(world_ranks)
        self._nccl = nccl
        self._sets: dict[int, tuple[HostChannel, GpuChannel | None]] = {}
        self._groups: dict[int, list[dist.ProcessGroup]] = {}

    def open(self, process_set: int, ranks: Sequence[int], timeout: timedelta) -> None:
        """Connect the members. **Every** rank must call this, members or not, in one order."""
        members = [self._world_ranks[rank] for rank in ranks]
        host = gpu = None
        if len(members) > 1:
            host = new_group(members, "gloo", timeout, everybody=len(self._world_ranks))
            if self._nccl:
                gpu = new_group(members, "nccl", timeout, everybody=len(self._world_ranks))
        if self.rank not in ranks:
            return
        place = list(ranks).index(self.rank)
        self._groups[process_set] = [group for group in (host, gpu) if group is not None]
        self._sets[process_set] = (
            HostChannel(place, len(members), host),
            None if gpu is None else GpuChannel(place, len(members), gpu),
        )

    def get(self, process_set: int, device: str) -> Channel:
        """What moves tensors of ``device`` (``cpu`` or ``cuda``) between the members."""
        host, gpu = self._sets[process_set]
        return gpu if device == "cuda" and gpu is not None else host

    def close(self, process_set: int) -> None:
        """Let go of the connections of a process set; members that wait in one get an error."""
        self._sets.pop(process_set, None)
        for group in self._groups.pop(process_set, []):
            destroy_group(group)

    def close_all(self) -> None:
        """Let go of every connection."""
        for process_set in list(self._sets):
            self.close(process_set)


def new_group(
    ranks: Sequence[int], backend: str, timeout: timedelta, *, everybody: int
) -> dist.ProcessGroup:
    """A process group of our own; only its members take part where not all ranks are Horovod's."""
    local = everybody < dist.get_world_size()
    with sealed(backend):
        return dist.new_group(
            list(ranks), timeout=timeout, backend=backend, use_local_synchronization=local
        )


def destroy_group(group: dist.ProcessGroup) -> None:
    """Close the connections of ``group``, if the world has not been closed already."""
    if dist.is_initialized():
        with contextlib.suppress(Exception):  # closed, or broken: it is gone either way
            dist.destroy_process_group(group)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _as_nccl_takes_it(flat: torch.Tensor, op: int) -> torch.Tensor:
    """A copy that NCCL can reduce in place."""
    if flat.dtype == torch.bool:
        return flat.to(torch.uint8)
    if flat.dtype == torch.int16:  # NCCL does not know it; int32 wraps to the same
        return flat.to(torch.int32)
    if flat.dtype in (torch.float16, torch.bfloat16) and op == Average:
        return flat.float()
    return flat.clone()


def _nccl_op(dtype: torch.dtype, op: int) -> dist.ReduceOp.RedOpType:
    if dtype == torch.bool:
        return dist.ReduceOp.MAX if op in (Sum, Average, Max) else dist.ReduceOp.MIN
    return _NCCL_OPS[op]
