"""``deepspeed.comm``: torch's collectives under DeepSpeed's names."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from paceline.compat.deepspeed.launching import init_distributed
from paceline.world import World

ReduceOp = dist.ReduceOp

_SAME = (
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)
_RENAMED = {
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "inference_all_reduce": "all_reduce",
}


def is_initialized() -> bool:
    """Whether this process has joined the others."""
    return World.joined() is not None if hasattr(World, "joined") else dist.is_initialized()


def get_rank(group: Any = None) -> int:
    """The rank among all, or in ``group``."""
    return World.current().rank if group is None else dist.get_rank(group)


def get_world_size(group: Any = None) -> int:
    """How many ranks there are, in all or in ``group``."""
    return World.current().size if group is None else dist.get_world_size(group)


def get_local_rank() -> int:
    """The rank on this machine."""
    return World.current().local_rank


def get_local_rank_from_launcher() -> int:
    """What the launcher says the rank on this machine is."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    """The group of all ranks."""
    return dist.group.WORLD


def __getattr__(name: str) -> Any:
    target = _RENAMED.get(name, name)
    if (name in _SAME or name in _RENAMED) and hasattr(dist, target):
        return getattr(dist, target)
    raise AttributeError(
        f"deepspeed.comm.{name} is not there. Use torch.distributed, whose group this is, or "
        "paceline.collectives."
    )


__all__ = ["ReduceOp", "get_rank", "get_world_size", "init_distributed", "is_initialized"]
