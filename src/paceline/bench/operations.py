"""The collectives as calls of ``torch.distributed``, with their memory made beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.world.group import Group

# torch 2.13 has new names for these two, and warns about the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Operation:
    """``call(i)`` runs the collective for the i-th time; ``size`` is what it counts as, in bytes.

    Where one rank is the root, another one is with every call: that one has to wait for what came
    before it, so that no rank runs far ahead of the others.
    """

    call: Callable[[int], Any]
    size: int


def prepare(
    name: str, members: Group, size: int, dtype: torch.dtype, device: torch.device
) -> Operation:
    """A collective of about ``size`` bytes: whole elements, and equally many for each rank."""
    each = max(1, size // dtype.itemsize // members.size)
    whole = torch.ones(each * members.size, dtype=dtype, device=device)
    if name == "barrier":
        return Operation(_barrier(members, device), 0)
    return Operation(_CALLS[name](members, whole), whole.nbytes)


def _barrier(members: Group, device: torch.device) -> Callable[[int], Any]:
    ids = [device.index] if device.type == "cuda" else None
    return lambda i: dist.barrier(members.process_group, device_ids=ids)


def _all_reduce(members: Group, whole: Tensor) -> Callable[[int], Any]:
    whole.zero_()  # so that sums stay what they are, however often they are summed
    return lambda i: dist.all_reduce(whole, group=members.process_group)


def _gather_all(members: Group, whole: Tensor) -> Callable[[int], Any]:
    mine = _part(members, whole).clone()
    return lambda i: _all_gather(whole, mine, group=members.process_group)


def _scatter_sum(members: Group, whole: Tensor) -> Callable[[int], Any]:
    mine = _part(members, whole).clone()
    return lambda i: _reduce_scatter(mine, whole, group=members.process_group)


def _all_to_all(members: Group, whole: Tensor) -> Callable[[int], Any]:
    received = torch.empty_like(whole)
    return lambda i: dist.all_to_all_single(received, whole, group=members.process_group)


def _broadcast(members: Group, whole: Tensor) -> Callable[[int], Any]:
    return lambda i: dist.broadcast(whole, _root(members, i), group=members.process_group)


def _reduce(members: Group, whole: Tensor) -> Callable[[int], Any]:
    whole.zero_()
    return lambda i: dist.reduce(whole, _root(members, i), group=members.process_group)


def _gather(members: Group, whole: Tensor) -> Callable[[int], Any]:
    mine, parts = _part(members, whole).clone(), list(whole.chunk(members.size))

    def call(i: int) -> None:
        is_root = i % members.size == members.rank
        dist.gather(
            mine, parts if is_root else None, _root(members, i), group=members.process_group
        )

    return call


def _scatter(members: Group, whole: Tensor) -> Callable[[int], Any]:
    mine, parts = _part(members, whole).clone(), list(whole.chunk(members.size))

    def call(i: int) -> None:
        is_root = i % members.size == members.rank
        dist.scatter(
            mine, parts if is_root else None, _root(members, i), group=members.process_group
        )

    return call


def _send_recv(members: Group, whole: Tensor) -> Callable[[int], Any]:
    received = torch.empty_like(whole)
    after = members.ranks[(members.rank + 1) % members.size]
    before = members.ranks[(members.rank - 1) % members.size]

    def call(i: int) -> None:
        # The receive first: Gloo serves the two directions of a connection one by one otherwise.
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, received, before, members.process_group),
                dist.P2POp(dist.isend, whole, after, members.process_group),
            ]
        )
        for work in works:
            work.wait()

    return call


def _root(members: Group, i: int) -> int:
    return members.ranks[i % members.size]


def _part(members: Group, whole: Tensor) -> Tensor:
    return whole.chunk(members.size)[members.rank]


_CALLS: dict[str, Callable[[Group, Tensor], Callable[[int], Any]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _gather_all,
    "reduce_scatter": _scatter_sum,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "send_recv": _send_recv,
}
