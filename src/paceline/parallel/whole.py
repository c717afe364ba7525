"""From a rank's part of a tensor to the whole of it, and back.

A parameter that is spread is a DTensor. Tensor parallelism cuts it first (axis ``tp``, any
dimension), sharding then cuts what each rank has left (axis ``shards``, dimension 0). Both cut as
``torch.chunk`` does, so that the last parts may be smaller or empty.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_ORDER = ("tp", "shards")
"""In which order the axes cut a tensor."""


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cuts(tensor: Tensor) -> list[tuple[str, int]]:
    """The axes over which ``tensor`` is cut, in order, each with the dimension that it cuts."""
    if not isinstance(tensor, DTensor):
        return []
    names = tensor.device_mesh.mesh_dim_names or ()
    found = {
        name: placement.dim
        for name, placement in zip(names, tensor.placements, strict=True)
        if hasattr(placement, "dim")
    }
    return [(axis, found[axis]) for axis in _ORDER if axis in found]


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """The part of ``whole`` that this rank holds of ``like``, a tensor of the same global shape."""
    part = whole
    for axis, dim in cuts(like):
        mesh = like.device_mesh  # type: ignore[attr-defined]
        part = _chunk(part, dim, mesh[axis].size(), mesh.get_local_rank(axis))
    return part


def as_part(whole: Tensor, like: Tensor) -> Tensor:
    """``whole`` spread as ``like`` is: a tensor of its own, on the device of ``like``."""
    own = part_of(whole, like).to(local(like).device).clone()
    return rewrap(own, like)


def rewrap(own: Tensor, like: Tensor) -> Tensor:
    """This rank's part ``own`` as a tensor that is spread as ``like`` is."""
    if not isinstance(like, DTensor):
        return own
    return DTensor.from_local(
        own,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """The whole of ``tensor``; a collective of the ranks that hold its parts."""
    part = local(tensor.detach())
    if not isinstance(tensor, DTensor):
        return part
    shapes = [tuple(tensor.shape)]
    mesh = tensor.device_mesh
    applied = cuts(tensor)
    for axis, dim in applied:  # the shape of this rank's part after each cut
        shapes.append(_cut_shape(shapes[-1], dim, mesh[axis].size(), mesh.get_local_rank(axis)))
    for (axis, dim), shape in zip(reversed(applied), reversed(shapes[:-1]), strict=True):
        part = _gather(part.contiguous(), mesh, axis, dim, shape)
    return part


def _gather(part: Tensor, mesh: DeviceMesh, axis: str, dim: int, shape: tuple[int, ...]) -> Tensor:
    size = mesh[axis].size()
    if size == 1:
        return part
    shapes = [_cut_shape(shape, dim, size, rank) for rank in range(size)]
    # Collectives want equal sizes, and the first part is the largest.
    padded = part.new_zeros(shapes[0])
    padded.narrow(dim, 0, part.shape[dim]).copy_(part)
    gathered = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(gathered, padded, group=mesh.get_group(axis))
    pieces = [piece.narrow(dim, 0, own[dim]) for piece, own in zip(gathered, shapes, strict=True)]
    return torch.cat(pieces, dim)


def _chunk(tensor: Tensor, dim: int, parts: int, index: int) -> Tensor:
    start, stop = _bounds(tensor.shape[dim], parts, index)
    return tensor.narrow(dim, start, stop - start)


def _cut_shape(shape: tuple[int, ...], dim: int, parts: int, index: int) -> tuple[int, ...]:
    start, stop = _bounds(shape[dim], parts, index)
    return (*shape[:dim], stop - start, *shape[dim + 1 :])


def _bounds(length: int, parts: int, index: int) -> tuple[int, int]:
    size = -(-length // parts)
    return min(index * size, length), min((index + 1) * size, length)


def same_shape(value: Any, parameter: Tensor) -> bool:
    """Whether ``value``, of an optimizer's state, has one element for each of ``parameter``'s."""
    return isinstance(value, Tensor) and value.shape == parameter.shape
