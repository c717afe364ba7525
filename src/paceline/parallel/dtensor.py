"""This rank's part of a DTensor, the whole of it, and the way back; plain tensors are whole.

A parameter that is spread is a DTensor. Tensor parallelism cuts it first (axis ``tp``, any
dimension), sharding then cuts what each rank has left (axis ``shards``, dimension 0).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.parallel.tensor.shards import COPIES, Runs, full_tensor, is_shared, local_of, runs_of


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cuts(tensor: Tensor) -> dict[str, int]:
    """The axes of the mesh over which ``tensor`` is cut, each with the dimension that it cuts."""
    if not isinstance(tensor, DTensor):
        return {}
    names = tensor.device_mesh.mesh_dim_names or ()
    return {
        name: placement.dim
        for name, placement in zip(names, tensor.placements, strict=True)
        if hasattr(placement, "dim")
    }


def is_first_copy(tensor: Tensor) -> bool:
    """Whether this rank is the first of the ``tp`` ranks that hold the same part of ``tensor``.

    Several do where heads of keys and values are fewer than ranks. Of a tensor that ``tp`` does not
    cut nothing can be said here: the answer is yes.
    """
    return copies(tensor) == 1 or tensor.device_mesh.get_local_rank(COPIES) == 0  # type: ignore[attr-defined]


def copies(tensor: Tensor) -> int:
    """How many ``tp`` ranks hold the same part of a ``tensor`` that ``tp`` cuts."""
    return tensor.device_mesh.size(-1) if is_shared(tensor) else 1  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """The whole of ``tensor``; a collective of the ranks that hold its parts."""
    return full_tensor(tensor)


def held_runs(tensor: Tensor) -> list[Runs]:
    """For each dimension of the whole: which indices ``local`` holds, as (first, length)."""
    return runs_of(tensor)


def part_of(full: Tensor, like: Tensor) -> Tensor:
    """The part of ``full`` that this rank holds of ``like``, a tensor of the same global shape."""
    return local_of(full, like) if isinstance(like, DTensor) else full


def as_part(full: Tensor, like: Tensor) -> Tensor:
    """``full`` spread as ``like`` is: a tensor of its own, on the device of ``like``."""
    own = part_of(full, like).to(local(like).device, copy=True)
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


def same_shape(value: Any, parameter: Tensor) -> bool:
    """Whether ``value``, of an optimizer's state, has one element for each of ``parameter``'s."""
    return isinstance(value, Tensor) and value.shape == parameter.shape
