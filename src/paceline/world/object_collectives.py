"""Collectives of Python objects.

Objects are pickled and signed (``objects.py``): ranks of one run trust each other, and nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import WorldError
from paceline.world.agreement import agree_on_call, explained
from paceline.world.group import Group, rank_problem
from paceline.world.objects import pack, unpack
from paceline.world.world import resolve_group


def broadcast_object(obj: Any = None, src: int = 0, group: Group | None = None) -> Any:
    """The object of rank ``src``, on every rank; what the others pass is ignored."""
    members = resolve_group(group, "broadcast_object")
    data, problem = b"", rank_problem(members, src, "broadcast_object: src")
    is_source = problem is None and members.ranks[members.rank] == src
    if is_source:
        data, problem = _pickled(obj, "broadcast_object")
    call = f"broadcast_object(src={src})"
    sizes = agree_on_call(members, call, checks=True, problem=problem, number=len(data))
    if members.size == 1:
        return unpack(data)
    size = sizes[members.ranks.index(src)]
    wire = _byte_tensor(data) if is_source else torch.empty(size, dtype=torch.uint8)
    with explained(members, call):
        dist.broadcast(wire, src, group=members.cpu_group)
    return obj if is_source else _unpickled(wire)


def all_gather_object(obj: Any, group: Group | None = None) -> list[Any]:
    """Every rank's object, in rank order."""
    members = resolve_group(group, "all_gather_object")
    data, problem = _pickled(obj, "all_gather_object")
    call = "all_gather_object"
    sizes = agree_on_call(members, call, checks=True, problem=problem, number=len(data))
    if members.size == 1:
        return [unpack(data)]
    # all_gather needs equal sizes: pad to the longest.
    mine = torch.zeros(max(sizes), dtype=torch.uint8)
    mine[: len(data)] = _byte_tensor(data)
    parts = [torch.empty_like(mine) for _ in sizes]
    with explained(members, call):
        dist.all_gather(parts, mine, group=members.cpu_group)
    return [_unpickled(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def gather_object(obj: Any, dst: int = 0, group: Group | None = None) -> list[Any] | None:
    """Every rank's object, in rank order, on rank ``dst``; ``None`` on the others."""
    members = resolve_group(group, "gather_object")
    data, problem = _pickled(obj, "gather_object")
    problem = rank_problem(members, dst, "gather_object: dst") or problem
    call = f"gather_object(dst={dst})"
    sizes = agree_on_call(members, call, checks=True, problem=problem, number=len(data))
    if members.size == 1:
        return [unpack(data)]
    is_target = members.ranks[members.rank] == dst
    outgoing = [_byte_tensor(data if rank == dst else b"") for rank in members.ranks]
    incoming = exchange_bytes(members, outgoing, sizes if is_target else [0] * members.size, call)
    return [_unpickled(part) for part in incoming] if is_target else None


def scatter_object(
    objects: Sequence[Any] | None = None, src: int = 0, group: Group | None = None
) -> Any:
    """What rank ``src`` has for this rank; only ``src`` passes ``objects``, one for each rank."""
    members = resolve_group(group, "scatter_object")
    problem = rank_problem(members, src, "scatter_object: src")
    is_source = problem is None and members.ranks[members.rank] == src
    data = [b""] * members.size
    if is_source and (objects is None or len(objects) != members.size):
        found = "None" if objects is None else f"{len(objects)} objects"
        problem = WorldError(
            f"scatter_object: rank {src} must pass a list of {members.size} objects, one for each "
            f"rank; got {found}."
        )
    elif is_source:
        assert objects is not None
        pickles = [_pickled(item, "scatter_object") for item in objects]
        data = [item for item, _ in pickles]
        problem = next((found for _, found in pickles if found is not None), None)
    call = f"scatter_object(src={src})"
    agree_on_call(members, call, checks=True, problem=problem)
    if members.size == 1:
        return unpack(data[0])
    sizes = _exchange_sizes(members, [len(item) for item in data], call)
    incoming = exchange_bytes(members, [_byte_tensor(item) for item in data], sizes, call)
    return _unpickled(incoming[members.ranks.index(src)])


def exchange_bytes(
    members: Group, outgoing: list[torch.Tensor], sizes: list[int], call: str
) -> list[torch.Tensor]:
    """Send ``outgoing[i]`` (``uint8``) to the i-th rank; ``sizes`` are the bytes that come back.

    Each result owns its memory, so that it can be viewed as any dtype.
    """
    process_group, device = members.wire(outgoing[0].device)
    sent = torch.cat(outgoing)
    received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    splits = [piece.numel() for piece in outgoing]
    with explained(members, call):
        dist.all_to_all_single(received, sent, sizes, splits, group=process_group)
    return [piece.clone() for piece in received.split(sizes)]


def exchange_objects(members: Group, objects: Sequence[Any], call: str) -> list[Any]:
    """Send ``objects[i]`` to the i-th rank, through host memory."""
    data = [pack(item) for item in objects]
    sizes = _exchange_sizes(members, [len(item) for item in data], call)
    incoming = exchange_bytes(members, [_byte_tensor(item) for item in data], sizes, call)
    return [_unpickled(part) for part in incoming]


def use_checks(members: Group, checks: bool | None) -> bool:
    """What a call asks for, else what the world was joined with."""
    return members.checks if checks is None else checks


def _exchange_sizes(members: Group, sizes: list[int], call: str) -> list[int]:
    mine = torch.tensor(sizes, dtype=torch.int64)
    theirs = torch.empty_like(mine)
    with explained(members, call):
        dist.all_to_all_single(theirs, mine, group=members.cpu_group)
    return [int(size) for size in theirs]


def _pickled(obj: Any, call: str) -> tuple[bytes, WorldError | None]:
    """The pickle of ``obj``, or why there is none (pickling may raise anything)."""
    try:
        return pack(obj), None
    except Exception as error:
        return b"", WorldError(
            f"{call}: this {type(obj).__name__} cannot be pickled: {type(error).__name__}: {error}"
        )


def _unpickled(data: torch.Tensor) -> Any:
    return unpack(data.numpy().tobytes())


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _NOTHING


_NOTHING = torch.empty(0, dtype=torch.uint8)
