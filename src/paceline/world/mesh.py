"""The ranks of a world as a grid with one axis for each way of spreading a model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.layout import Layout
from paceline.world.sealing import sealed

AXES = ("pp", "copies", "shards", "cp", "tp")
"""The names of a mesh's axes, outermost first; ``Layout.coordinate`` counts the same way."""


def make_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """The grid of ``layout`` over all ranks; a collective. Needs a process group."""
    shape = (layout.pp, layout.copies, layout.shards, layout.cp, layout.tp)
    with sealed("gloo" if device.type == "cpu" else None):
        return init_device_mesh(device.type, shape, mesh_dim_names=AXES)


def group_of_one(device: torch.device) -> None:
    """A default process group for a process without peers: a mesh needs one."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=HashStore(),
        rank=0,
        world_size=1,
    )
