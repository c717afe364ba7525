"""Dropout and other draws under tensor parallelism: which random numbers each rank draws.

Numbers that do not know the layout go by an element's place in the whole tensor, which is known
here. Else the ``tp`` ranks hold the same seed and draw the same numbers, so that what is whole on
all of them stays equal, and on its own heads or features a rank must draw numbers of its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from paceline.nested import map_tensors, tensors
from paceline.parallel.tensor.shards import gathered, is_packed, rows_of, runs_of, wrap
from paceline.randomness import ForwardRandomness, TensorPart, active


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


def draw_part(
    randomness: ForwardRandomness, function: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """What ``function`` draws for this rank's part of the DTensor it is called with."""
    x = next(t for t in tensors((args, kwargs)) if isinstance(t, DTensor))
    mesh, where = x.device_mesh, x.placements[-1]
    alike = all(
        not isinstance(t, DTensor) or (t.shape == x.shape and t.placements == x.placements)
        for t in tensors((args, kwargs))
    )
    if where.is_partial() or not alike:
        whole = map_tensors((args, kwargs), gathered)
        return randomness.draw(function, *whole)
    part = TensorPart(tuple(x.shape), runs_of(x))
    args, kwargs = map_tensors((args, kwargs), _local)
    with randomness.on_part(part):
        y = randomness.draw(function, args, kwargs)
    in_place = y is next(tensors((args, kwargs)))
    return x if in_place else wrap(y, mesh, where, x.shape)


def own_heads(
    mesh: DeviceMesh, shape: Sequence[int], dim: int
) -> contextlib.AbstractContextManager[None]:
    """What is drawn inside is for this rank's part, along ``dim``, of a tensor of ``shape``."""
    randomness = active()
    if randomness is None:
        return own_randomness(mesh)
    runs = [[(0, size)] for size in shape]
    runs[dim] = [rows_of(shape[dim], mesh.size(), mesh.get_local_rank())]
    return randomness.on_part(TensorPart(tuple(shape), runs))


def drawing(function: Any) -> Any:
    """``function``, which draws, on plain tensors: whatever mode is on, or none."""
    randomness = active()
    return function if randomness is None else functools.partial(randomness.call, function)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextlib.contextmanager
def own_randomness(mesh: DeviceMesh) -> Iterator[None]:
    """Random numbers of this rank's own, from a seed that all ``tp`` ranks draw alike."""
    seed = int(torch.randint(2**62, ()))
    devices = [torch.cuda.current_device()] if mesh.device_type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed + 1 + mesh.get_local_rank())
        yield
