"""Sending a tensor from one rank to another."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import CollectiveMismatch, WorldError
from paceline.world.agreement import explained
from paceline.world.group import Group
from paceline.world.tensors import as_bytes, describe, from_bytes, tensor_problem, write_problem
from paceline.world.world import World, resolve_group

_HEADER = 512
"""Bytes of the message that announces a tensor: its dtype, shape and device, as JSON."""


def send(tensor: torch.Tensor, dst: int, group: Group | None = None) -> None:
    """Send ``tensor`` to rank ``dst``, which must call ``recv``; returns once it is taken.

    Two ranks that both send first wait for each other until the timeout: let one of them receive
    first, or use ``all_to_all``.
    """
    members = resolve_group(group, "send")
    _require_peer(members, dst, "send", "dst")
    call = f"send(dst={dst}) of {describe(tensor)}"
    problem = tensor_problem("send", tensor)
    if problem is not None:
        # The receiver gets the reason, instead of waiting for a tensor that will not come.
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
    """The tensor rank ``src`` sends with ``send``.

    With ``out`` it is written there (and ``out`` returned): shape and dtype must be those sent,
    else ``CollectiveMismatch`` is raised, the message is dropped and the next one can be
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
        data = torch.empty(dtype.itemsize * math.prod(shape), dtype=torch.uint8, device=device)
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


def _header_bytes(header: dict[str, Any]) -> torch.Tensor:
    text = json.dumps(header).encode().ljust(_HEADER)
    assert len(text) == _HEADER, "64 dimensions fit, and torch has no more"
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _require_peer(members: Group, rank: int, call: str, what: str) -> None:
    members.index_of(rank, f"{call}: {what}")
    if members.ranks[members.rank] == rank:
        raise WorldError(f"{call}: {what}={rank} is this rank itself; name another one.")
