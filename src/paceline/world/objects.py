"""Python objects as bytes between ranks: pickled, and signed with a key that only the ranks know.

A pickle is a program. Ranks of one run trust each other, but the connections that Gloo makes are
neither encrypted nor authenticated: so a message is unpickled only if it carries the signature
(HMAC-SHA256) of this world. The key is made when the ranks join, and handed out by the store of the
round: where the run has a secret, nobody else can read that.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import secrets
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from paceline.errors import WorldError
from paceline.world.group import backend_by_device

SIGNATURE_BYTES = 32
_state: dict[str, bytes] = {"key": secrets.token_bytes(32)}


def agree_on_key(store: Any) -> None:
    """Take the key of the world that joins at ``store``; the first rank to come makes it."""
    made = store.compare_set("object-key", "", secrets.token_hex(32))
    _state["key"] = hashlib.sha256(bytes(made)).digest()


def pack(obj: Any) -> bytes:
    """An object as bytes for other ranks; raises what pickling raises."""
    try:
        data = pickle.dumps(obj)
    except Exception:
        data = cloudpickle.dumps(obj)  # it holds a lambda, or a class that travelled by value
    return _signature(data) + data


def unpack(data: bytes) -> Any:
    """The object that a rank of this world packed; raises WorldError for anybody else's."""
    signature, rest = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, _signature(rest)):
        raise WorldError(
            f"a message of {len(data)} bytes does not carry the signature of this world, and is "
            "not unpickled: it was damaged on its way, or a stranger sent it. Use a private "
            "network between the machines."
        )
    return pickle.loads(rest)


def all_gather(obj: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's object, in the order of ranks."""
    mine, sizes = _padded(obj, group)
    parts = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(parts, mine, group=group)
    return [_unpacked(part, size) for part, size in zip(parts, sizes, strict=True)]


def gather(obj: Any, group: dist.ProcessGroup | None) -> list[Any] | None:
    """Every rank's object on the group's first rank; ``None`` on the others."""
    mine, sizes = _padded(obj, group)
    is_first = dist.get_rank(group) == 0
    parts = [torch.empty_like(mine) for _ in sizes] if is_first else None
    dist.gather(mine, parts, group=group, group_dst=0)
    if parts is None:
        return None
    return [_unpacked(part, size) for part, size in zip(parts, sizes, strict=True)]


def scatter(objects: Sequence[Any] | None, group: dist.ProcessGroup | None) -> Any:
    """This rank's of the objects that the group's first rank has for everyone."""
    ranks = dist.get_world_size(group)
    device = _device(group)
    packed = [pack(obj) for obj in objects] if objects is not None else []
    sizes = torch.tensor([len(data) for data in packed] or [0] * ranks, device=device)
    dist.broadcast(sizes, group=group, group_src=0)
    most = int(sizes.max())
    parts = [_bytes_of(data, most).to(device) for data in packed] or None
    mine = torch.empty(most, dtype=torch.uint8, device=device)
    dist.scatter(mine, parts, group=group, group_src=0)
    return _unpacked(mine, int(sizes[dist.get_rank(group)]))


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors must be to travel in ``group``: in host memory, if they can."""
    on_cpu = "cpu" in backend_by_device(group)
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def _padded(obj: Any, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, list[int]]:
    """This rank's object, as long as the longest of all, and how long each is."""
    data = pack(obj)
    device = _device(group)
    own = torch.tensor([len(data)], device=device)
    sizes = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, own, group=group)
    lengths = [int(size) for size in sizes]
    return _bytes_of(data, max(lengths)).to(device), lengths


def _bytes_of(data: bytes, length: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)


def _unpacked(part: torch.Tensor, size: int) -> Any:
    return unpack(part[:size].cpu().numpy().tobytes())


def _signature(data: bytes) -> bytes:
    return hmac.digest(_state["key"], data, "sha256")
