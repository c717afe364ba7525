"""Give all ranks of a group the weights of the first: in bounded pieces, and only what differs.

Every rank hashes what it has; where the hashes agree, as they do when all ranks have built the
model from one seed, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from paceline.world import Group, collectives
from paceline.world.agreement import explained
from paceline.world.tensors import as_bytes

_PIECE_BYTES = 32 * 2**20
"""The most that is sent at once: what a rank needs beside its tensors."""


@torch.no_grad()
def take_first_values(
    tensors: Mapping[str, Tensor],
    group: Group,
    device: torch.device,
    piece_bytes: int = _PIECE_BYTES,
) -> list[str]:
    """Overwrite ``tensors`` with those of the first rank of ``group``; the names that differed.

    All ranks must bring the same names, shapes and dtypes; strides may differ. The values travel
    from and to ``device``, wherever the tensors are, at most ``piece_bytes`` at once. A collective.
    """
    if group.size == 1:
        return []
    odd = {name: t for name, t in tensors.items() if _is_odd(t)}
    plain = _Bytes({name: t for name, t in tensors.items() if t.numel() and name not in odd})
    pieces = list(plain.pieces(piece_bytes))
    # Each part has a hash of its own, so that a tensor is not named for its neighbour in a piece.
    flags = iter(_that_differ([plain.hash(part) for piece in pieces for part in piece], group))
    different = [[part for part in piece if next(flags)] for piece in pieces]
    for piece in different:
        if piece:
            _send(plain, piece, group, device)
    for tensor in odd.values():
        values = collectives.broadcast_object(tensor.detach().cpu(), group.ranks[0], group)
        tensor.data = values.to(tensor.device)
    return list(dict.fromkeys(part.name for piece in different for part in piece))


def fingerprint(tensor: Tensor) -> int:
    """A hash of the values of ``tensor``."""
    if _is_odd(tensor):
        tensor = tensor.int_repr() if tensor.is_quantized else tensor.detach().to_dense()
    return xxhash.xxh3_64_intdigest(as_bytes(tensor).cpu().numpy().data)


class _Part(NamedTuple):
    """Some bytes of one tensor."""

    name: str
    start: int
    stop: int


class _Bytes:
    """Tensors as their bytes, in the order of their elements, whatever their strides."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._copied: tuple[str, Tensor] | None = None  # the last one that had to be

    def pieces(self, most: int) -> Iterator[list[_Part]]:
        """What is sent at once: several small tensors, or a part of a large one."""
        piece: list[_Part] = []
        room = most
        for name, tensor in self._tensors.items():
            at, size = 0, tensor.numel() * tensor.element_size()
            while at < size:
                stop = min(size, at + room)
                piece.append(_Part(name, at, stop))
                room -= stop - at
                at = stop
                if room == 0:
                    yield piece
                    piece, room = [], most
        if piece:
            yield piece

    def read(self, part: _Part) -> Tensor:
        """The bytes of ``part``; those of the tensor itself where it is contiguous."""
        return self._flat(part.name)[part.start : part.stop]

    def write(self, part: _Part, values: Tensor) -> None:
        """Put ``values`` in the place of ``part``."""
        self.read(part).copy_(values)
        tensor = self._tensors[part.name].detach()
        if _is_flat(tensor):
            return
        whole = self._flat(part.name).view(tensor.dtype).view(tensor.shape)
        for dim, (stride, length) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
            if stride == 0 and length > 1:  # expanded: its elements share one place in memory
                tensor, whole = tensor.narrow(dim, 0, 1), whole.narrow(dim, 0, 1)
        tensor.copy_(whole)

    def hash(self, part: _Part) -> int:
        """A hash of the bytes of ``part``, as it fits into an ``int64``."""
        digest = xxhash.xxh3_64(self.read(part).cpu().numpy().data).digest()
        return int.from_bytes(digest, "little", signed=True)

    def _flat(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if _is_flat(tensor):
            return as_bytes(tensor)
        if self._copied is None or self._copied[0] != name:
            self._copied = name, as_bytes(tensor)
        return self._copied[1]


def _that_differ(hashes: Sequence[int], group: Group) -> list[bool]:
    """Which of them differ on any rank from those of the first."""
    own = torch.tensor(hashes, dtype=torch.int64)
    first = collectives.broadcast(own.clone(), group.ranks[0], group)
    differ = (own != first).to(torch.uint8)
    return [bool(flag) for flag in collectives.all_reduce(differ, "max", group).tolist()]


def _send(plain: _Bytes, piece: Sequence[_Part], group: Group, device: torch.device) -> None:
    process_group, wire = group.wire(device)
    flat = torch.cat([plain.read(part).to(wire) for part in piece])
    with explained(group, "the broadcast of rank 0's values"):
        dist.broadcast(flat, src=group.ranks[0], group=process_group)
    if group.rank == 0:
        return
    for part, values in zip(piece, flat.split([p.stop - p.start for p in piece]), strict=True):
        plain.write(part, values)


def _is_flat(tensor: Tensor) -> bool:
    """Whether its bytes lie in memory in the order in which they are sent."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _is_odd(tensor: Tensor) -> bool:
    """Whether its values are not a plain run of elements, as those of sparse ones are not."""
    return tensor.layout != torch.strided or tensor.is_quantized
