"""Dropout under tensor parallelism: which random numbers each rank draws.

The ``tp`` ranks hold the same seed and draw the same numbers, so that what is whole on all of them
stays equal. On its own heads or features a rank must draw numbers of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from paceline.parallel.tensor.shards import is_packed, wrap


def split_dropout(mesh: DeviceMesh, function: Any, x: DTensor, *args: Any, **others: Any) -> Tensor:
    """A dropout function on a tensor that is a DTensor."""
    others.pop("inplace", None)
    where = x.placements[-1]
    if where.is_partial():
        x, where = x.redistribute(mesh, [Replicate()]), Replicate()
    split = where.is_shard() or is_packed(x)
    with own_randomness(mesh) if split else contextlib.nullcontext():
        y = function(x.to_local(), *args, **others)
    return wrap(y, mesh, where, x.shape)


@contextlib.contextmanager
def own_randomness(mesh: DeviceMesh) -> Iterator[None]:
    """Random numbers of this rank's own, from a seed that all ``tp`` ranks draw alike."""
    seed = int(torch.randint(2**62, ()))
    devices = [torch.cuda.current_device()] if mesh.device_type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed + 1 + mesh.get_local_rank())
        yield
