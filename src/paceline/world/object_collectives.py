"""What is built on moving bytes: point-to-point tensors, and Python objects between ranks.

Objects are pickled and signed (``objects.py``): ranks of one run trust each other, and nobody else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import CollectiveMismatch, WorldError
from paceline.world.agreement import explained, meet
from paceline.world.group import Group
from paceline.world.objects import pack, unpack
from paceline.world.tensors import as_bytes, describe, from_bytes, tensor_problem, write_problem
from paceline.world.world import World, resolve_group

_HEADER = 512
"""Bytes of the message that announces a tensor: its dtype, shape and device, as JSON."""


def send(tensor: torch.Tensor, dst: int, group: Group | None = None) -> None:
    """Send ``tensor`` to rank ``dst``, which must call :func:`recv`; returns once it is taken.

    Two ranks that both send first wait for each other until the timeout: let one of them receive
    first, or use :func:`all_to_all`.
    """
    members = resolve_group(group, "send")
    _require_peer(members, dst, "send", "dst")
    call = f"send(dst={dst}) of {describe(tensor)}"
    problem = tensor_problem("send", tensor)
    if problem is not None:
        # The receiver is told, instead of waiting for a tensor that will not come.
        with explained(members, call):
            dist.send(_header_bytes({"refused": str(problem)[:200]}), dst, members.cpu_group)
        raise problem
    process_group, device = members.wire(tensor.device)
    header = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "device": tensor.device.type,
    }
    with explained(members, call):
        dist.send(_header_bytes(header), dst, members.cpu_group)
        if tensor.numel() > 0:
            dist.send(as_bytes(tensor).to(device), dst, process_group)


def recv(src: int, out: torch.Tensor | None = None, group: Group | None = None) -> torch.Tensor:
    """The tensor rank ``src`` sends with :func:`send`.

    With ``out`` it is written there (and ``out`` returned): shape and dtype must be those sent,
    else :class:`CollectiveMismatch` is raised, the message is dropped and the next one can be
    received. Without, a new tensor is made, on this rank's device if the sender's was of its kind.
    """
    members = resolve_group(group, "recv")
    _require_peer(members, src, "recv", "src")
    if out is not None and (problem := tensor_problem("recv", out) or write_problem("recv", out)):
        raise problem
    call = f"recv(src={src})"
    text = torch.empty(_HEADER, dtype=torch.uint8)
    with explained(members, call):
        dist.recv(text, src, members.cpu_group)
        header = json.loads(bytes(text.tolist()))
        if "refused" in header:
            raise CollectiveMismatch(f"recv: rank {src} refused its send: {header['refused']}")
        dtype, shape = getattr(torch, header["dtype"]), tuple(header["shape"])
        here = World.current().device
        home = here if header["device"] == here.type else torch.device("cpu")
        process_group, device = members.wire(home)
        data = torch.empty(dtype.itemsize * _count(shape), dtype=torch.uint8, device=device)
        if data.numel() > 0:
            dist.recv(data, src, process_group)
    received = from_bytes(data, dtype, shape, home)
    if out is None:
        return received
    if (out.dtype, tuple(out.shape)) != (dtype, shape):
        raise CollectiveMismatch(
            f"recv: rank {src} sent {describe(received)} but out is {describe(out)}. The message "
            "was dropped; leave out=None to receive whatever comes."
        )
    out.detach().copy_(received)
    return out


def broadcast_object(obj: Any = None, src: int = 0, group: Group | None = None) -> Any:
    """The object of rank ``src``, on every rank; what the others pass is ignored."""
    members = resolve_group(group, "broadcast_object")
    data, problem = b"", _rank_problem(members, src, "broadcast_object: src")
    is_source = problem is None and members.ranks[members.rank] == src
    if is_source:
        data, problem = _pickled(obj, "broadcast_object")
    call = f"broadcast_object(src={src})"
    sizes = meet(members, call, checks=True, problem=problem, number=len(data))
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
    sizes = meet(members, call, checks=True, problem=problem, number=len(data))
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
    problem = _rank_problem(members, dst, "gather_object: dst") or problem
    call = f"gather_object(dst={dst})"
    sizes = meet(members, call, checks=True, problem=problem, number=len(data))
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
    problem = _rank_problem(members, src, "scatter_object: src")
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
    meet(members, call, checks=True, problem=problem)
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


def _header_bytes(header: dict[str, Any]) -> torch.Tensor:
    text = json.dumps(header).encode().ljust(_HEADER)
    assert len(text) == _HEADER, "64 dimensions fit, and torch has no more"
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _exchange_sizes(members: Group, sizes: list[int], call: str) -> list[int]:
    mine = torch.tensor(sizes, dtype=torch.int64)
    theirs = torch.empty_like(mine)
    with explained(members, call):
        dist.all_to_all_single(theirs, mine, group=members.cpu_group)
    return [int(size) for size in theirs]


def _require_peer(members: Group, rank: int, call: str, what: str) -> None:
    members.index_of(rank, f"{call}: {what}")
    if members.ranks[members.rank] == rank:
        raise WorldError(f"{call}: {what}={rank} is this rank itself; name another one.")


def _rank_problem(members: Group, rank: int, what: str) -> WorldError | None:
    try:
        members.index_of(rank, what)
    except WorldError as problem:
        return problem
    return None


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


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


_NOTHING = torch.empty(0, dtype=torch.uint8)
