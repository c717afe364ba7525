"""Which part of a tensor a rank holds, cutting it out, and putting the whole together again.

A split tensor is a DTensor over the one-dimensional mesh of the ``tp`` ranks: ``Shard(dim)``, or,
where several layers were written as one (queries, keys and values in one projection), *packed*:
each rank holds its part of every one of ``chunks`` equal chunks. torch writes a packed tensor as
``_StridedShard(dim, split_factor=chunks)``; this file is the only one that knows. FSDP2 may have
cut the ``tp`` rank's part once more along an outer dimension of the mesh.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

# Private, and all that torch has for this; tests/parallel/test_tensor_layers.py says (torch 2.11
# to 2.13) when its meaning changes.
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from paceline.nested import map_tensors
from paceline.world.group import backend_by_device

COPIES = "tp_copies"
"""The axis of a mesh along which ``tp`` ranks hold the same part; see shared_heads.py."""


def placement(dim: int, chunks: int = 1) -> Placement:
    """Split along ``dim``; with ``chunks`` > 1, each of that many equal chunks is split."""
    return Shard(dim) if chunks == 1 else _StridedShard(dim, split_factor=chunks)


def split_of(tensor: DTensor) -> tuple[int, int] | None:
    """``(dim, chunks)`` of a tensor on the ``tp`` mesh; ``None`` when it is not split."""
    return _dim_and_chunks(tensor.placements[-1])


def is_packed(tensor: DTensor) -> bool:
    """Whether the ranks hold a part of each of several chunks."""
    return isinstance(tensor.placements[-1], _StridedShard)


def is_shared(tensor: Any) -> bool:
    """Whether ``tensor`` is spread over a grid of heads and copies; see shared_heads.py."""
    if not isinstance(tensor, DTensor):
        return False
    names = tensor.device_mesh.mesh_dim_names
    return names is not None and names[-1] == COPIES


def mark_logits(tensor: Any) -> Any:
    """Note that a split tensor is made of logits, which user code may do anything with."""
    if isinstance(tensor, DTensor):
        tensor._paceline_logits = True  # type: ignore[attr-defined]
    return tensor


def are_logits(tensor: DTensor) -> bool:
    """Whether ``mark_logits`` noted it."""
    return getattr(tensor, "_paceline_logits", False)


def rows_of(size: int, parts: int, index: int) -> tuple[int, int]:
    """Where part ``index`` of ``parts`` of a dimension begins and how long it is, as torch cuts."""
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(step, size - start)


def cut(full: Tensor, mesh: DeviceMesh, dim: int, chunks: int = 1) -> Tensor:
    """This rank's part of ``full``, which every rank holds; memory of its own."""
    return cut_part(full, mesh.size(), mesh.get_local_rank(), dim, chunks)


def cut_part(full: Tensor, parts: int, index: int, dim: int, chunks: int = 1) -> Tensor:
    """Part ``index`` of ``parts`` of ``full``; memory of its own."""
    pieces = []
    for chunk in full.chunk(chunks, dim):
        start, length = rows_of(chunk.shape[dim], parts, index)
        pieces.append(chunk.narrow(dim, start, length))
    return torch.cat(pieces, dim) if chunks > 1 else pieces[0].clone(memory_format=_CONTIGUOUS)


_CONTIGUOUS = torch.contiguous_format


def wrap(local: Tensor, mesh: DeviceMesh, where: Placement, shape: torch.Size) -> DTensor:
    """The tensor of global ``shape`` of which ``local`` is this rank's part."""
    stride = torch.empty(shape, device="meta").stride()
    placements = [where, *[Replicate()] * (mesh.ndim - 1)]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=tuple(stride)
    )


def wrap_all(local: Tensor, like: DTensor) -> DTensor:
    """The tensor that is spread as ``like`` is and of which ``local`` is this rank's part."""
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def replicated(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """A plain tensor, equal on all ranks, as a DTensor; its gradient comes back summed."""
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, _whole_on(mesh), run_check=False)


def as_split(tensor: Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """``tensor``, whatever it is, split along ``dim``."""
    if isinstance(tensor, DTensor) and is_packed(tensor):
        tensor = gathered(tensor)
    return replicated(on_mesh(tensor, mesh), mesh).redistribute(mesh, [Shard(dim % tensor.ndim)])


def as_whole(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """``tensor``, whatever it is, whole on every rank, as a DTensor."""
    if isinstance(tensor, DTensor) and is_packed(tensor):
        tensor = gathered(tensor)
    return replicated(on_mesh(tensor, mesh), mesh).redistribute(mesh, _whole_on(mesh))


def on_mesh(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """``tensor``; where it is spread over the ranks as a grid of heads and copies, over ``mesh``.

    Split along the same dimension where that divides by all ranks, else whole and plain.
    """
    if not isinstance(tensor, DTensor) or not is_shared(tensor):
        return tensor
    where, grid = tensor.placements[0], tensor.device_mesh
    if not isinstance(where, Shard) or tensor.shape[where.dim] % mesh.size():
        return gathered(tensor)
    finer = tensor.redistribute(grid, [where, where])
    return wrap(finer.to_local(), mesh, where, tensor.shape)


def _whole_on(mesh: DeviceMesh) -> list[Placement]:
    return [Replicate()] * mesh.ndim


def summed(local: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of all ranks' ``local``, plain; the gradient of the sum is each rank's gradient."""
    return _Sum.apply(local, mesh)


class _Sum(torch.autograd.Function):
    """Not DTensor's way, whose result is a view that a model may not change in place."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: DeviceMesh) -> Tensor:
        total = local.clone(memory_format=_CONTIGUOUS)
        dist.all_reduce(total, group=mesh.get_group())
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        return grads[0], None


def gathered(tensor: Tensor) -> Tensor:
    """The whole of an activation as a plain tensor on every rank; differentiable."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    if is_packed(tensor):
        dim, chunks = _dim_and_chunks(tensor.placements[-1]) or (0, 1)
        shape = tensor.shape
        apart = torch.Size((*shape[:dim], chunks, shape[dim] // chunks, *shape[dim + 1 :]))
        local = tensor.to_local().unflatten(dim, (chunks, -1))
        tensor = wrap(local, mesh, Shard(dim + 1), apart)
        whole = tensor.redistribute(mesh, [Replicate()]).to_local().flatten(dim, dim + 1)
    else:
        whole = tensor.redistribute(mesh, _whole_on(mesh)).to_local()
    # A view from inside DTensor's autograd function; a model may change what it gets in place.
    return whole.clone() if whole.requires_grad else whole


def plain(value: Any) -> Any:
    """``value`` with every split tensor in it replaced by the whole, plain one; differentiable.

    Looks into containers; one that holds no split tensor is returned as it is. A collective where
    something is split.
    """
    return map_tensors(value, gathered)


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a parameter, a gradient or an optimizer's state, in its original order.

    A collective over the ranks that hold its parts. Works for what ``apply_plan`` and
    ``fully_shard`` on top of it made, packed weights included, for which DTensor's own
    ``full_tensor()`` gives a wrong order once FSDP2 has cut them too.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    local = tensor.to_local().detach()
    sizes = _local_sizes(tensor)
    # fully_shard cuts last, along the outer dimensions of the mesh: undo it first.
    for index, where in enumerate(tensor.placements):
        found = _dim_and_chunks(where)
        if found is None:
            if where.is_partial():
                raise ValueError(f"full_tensor: {where} is a sum still to be made, not a part.")
            continue
        dim, chunks = found
        inner = _is_tp(tensor, index)
        local = _gather(local, tensor.device_mesh, index, dim, sizes[index], chunks if inner else 1)
    return local


@torch.no_grad()
def local_of(full: Tensor, like: DTensor) -> Tensor:
    """The part of ``full`` that this rank holds of ``like``; the inverse of ``full_tensor``."""
    local = full
    for index in reversed(range(like.device_mesh.ndim)):
        found = _dim_and_chunks(like.placements[index])
        if found is not None:
            mesh = like.device_mesh
            dim, chunks = found
            chunks = chunks if _is_tp(like, index) else 1
            local = cut_part(local, mesh.size(index), mesh.get_local_rank(index), dim, chunks)
    return local.clone() if local is full else local


Runs = list[tuple[int, int]]
"""Stretches of indices along one dimension, in the order in which they are held: first, length."""


def runs_of(tensor: Tensor) -> list[Runs]:
    """For each dimension of the whole of ``tensor``: the indices of what this rank holds of it."""
    runs: list[Runs] = [[(0, size)] for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return runs
    mesh = tensor.device_mesh
    for index in reversed(range(mesh.ndim)):
        found = _dim_and_chunks(tensor.placements[index])
        if found is not None:
            dim, chunks = found
            chunks = chunks if _is_tp(tensor, index) else 1
            runs[dim] = cut_runs(runs[dim], mesh.size(index), mesh.get_local_rank(index), chunks)
    return runs


def cut_runs(runs: Runs, parts: int, index: int, chunks: int = 1) -> Runs:
    """What part ``index`` of ``parts`` has of ``runs``; of each of ``chunks`` equal chunks."""
    size = sum(length for _, length in runs) // chunks
    start, length = rows_of(size, parts, index)
    return [
        piece
        for chunk in range(chunks)
        for piece in _between(runs, chunk * size + start, chunk * size + start + length)
    ]


def _between(runs: Runs, start: int, end: int) -> Runs:
    """The indices at the positions from ``start`` up to ``end``."""
    found, position = [], 0
    for first, length in runs:
        low, high = max(start, position), min(end, position + length)
        if low < high:
            found.append((first + low - position, high - low))
        position += length
    return found


def _dim_and_chunks(where: Any) -> tuple[int, int] | None:
    if isinstance(where, _StridedShard):
        return where.dim, int(where.split_factor)
    return (where.dim, 1) if isinstance(where, Shard) else None


def _is_tp(tensor: DTensor, index: int) -> bool:
    """Whether a stride along this dimension of the mesh is a packing of ours.

    FSDP2 writes a stride too, but only to say that ``tp`` cut first, which is always so here.
    """
    names = tensor.device_mesh.mesh_dim_names
    return tensor.device_mesh.ndim == 1 or (names is not None and names[index] == "tp")


def _local_sizes(tensor: DTensor) -> list[int]:
    """For each dimension of the mesh, how long what it cuts was before it was cut."""
    shape, sizes, mesh = list(tensor.shape), [0] * tensor.device_mesh.ndim, tensor.device_mesh
    for index in reversed(range(mesh.ndim)):
        found = _dim_and_chunks(tensor.placements[index])
        if found is None:
            continue
        dim, chunks = found
        sizes[index] = shape[dim]
        chunks = chunks if _is_tp(tensor, index) else 1
        part = rows_of(shape[dim] // chunks, mesh.size(index), mesh.get_local_rank(index))[1]
        shape[dim] = part * chunks
    return sizes


def _gather(
    local: Tensor, mesh: DeviceMesh, index: int, dim: int, size: int, chunks: int
) -> Tensor:
    """The parts along one dimension of the mesh put together; they may be of unequal length."""
    parts = mesh.size(index)
    lengths = [rows_of(size // chunks, parts, i)[1] for i in range(parts)]
    apart = local.unflatten(dim, (chunks, local.shape[dim] // chunks))
    padded = apart.new_zeros((*apart.shape[: dim + 1], max(lengths), *apart.shape[dim + 2 :]))
    padded.narrow(dim + 1, 0, apart.shape[dim + 1]).copy_(apart)
    group = mesh.get_group(index)
    if padded.device.type not in backend_by_device(group):
        padded = padded.to(mesh.device_type)  # offloaded, and NCCL takes nothing from the CPU
    received = [torch.empty_like(padded) for _ in range(parts)]
    dist.all_gather(received, padded, group=group)
    trimmed = [r.narrow(dim + 1, 0, n) for r, n in zip(received, lengths, strict=True)]
    return torch.cat(trimmed, dim + 1).flatten(dim, dim + 1).to(local.device)
