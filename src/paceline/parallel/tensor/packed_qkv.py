"""What code does with the output of several layers in one: take it apart again.

A packed output holds ``chunks`` equal parts one after the other along one dimension, each spread
over the ranks. Splitting, slicing and viewing it along those parts needs no communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.parallel.tensor.shards import placement, split_of, wrap


def _parts(x: DTensor) -> tuple[int, int, int]:
    """The packed dimension, how many chunks, and how long each is."""
    found = split_of(x)
    assert found is not None
    return found[0], found[1], x.shape[found[0]] // found[1]


def take(x: DTensor, first: int, count: int) -> DTensor:
    """``count`` chunks from number ``first`` on."""
    dim, chunks, length = _parts(x)
    held = x.to_local()
    step = held.shape[dim] // chunks
    local = held.narrow(dim, first * step, count * step)
    shape = torch.Size((*x.shape[:dim], count * length, *x.shape[dim + 1 :]))
    return wrap(local, x.device_mesh, placement(dim, count), shape)


def split(x: DTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[DTensor, ...] | None:
    """``torch.split``; ``None`` when a cut falls inside a chunk."""
    packed_dim, _, length = _parts(x)
    if dim % x.ndim != packed_dim:
        return None
    total = x.shape[packed_dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
    if any(size % length or not size for size in sizes) or sum(sizes) != total:
        return None
    made, first = [], 0
    for size in sizes:
        made.append(take(x, first, size // length))
        first += size // length
    return tuple(made)


def chunk(x: DTensor, chunks: int, dim: int = 0) -> tuple[DTensor, ...] | None:
    """``torch.chunk``; ``None`` when a cut falls inside a chunk of ``x``."""
    return split(x, -(-x.shape[dim] // chunks), dim)


def view(x: DTensor, shape: Sequence[int]) -> DTensor | None:
    """``x.view(shape)``; ``None`` unless the packed dimension is kept or cut into its chunks."""
    dim, chunks, length = _parts(x)
    shape = list(shape)
    if -1 in shape:
        known = math.prod(size for size in shape if size != -1)
        shape[shape.index(-1)] = x.numel() // max(known, 1)
    before, after = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
    ranks = x.device_mesh.size()
    for at in range(len(shape)):
        if math.prod(shape[:at]) != before:
            continue
        if shape[at] == chunks * length and math.prod(shape[at + 1 :]) == after:
            return _viewed(x, shape, at, chunks)
        if shape[at] == chunks and at + 1 < len(shape) and shape[at + 1] % ranks == 0:
            return _viewed(x, shape, at + 1, 1)
    return None


def _viewed(x: DTensor, shape: list[int], dim: int, chunks: int) -> DTensor:
    local = list(shape)
    local[dim] //= x.device_mesh.size()
    held = x.to_local().reshape(local)
    return wrap(held, x.device_mesh, placement(dim, chunks), torch.Size(shape))


def item(x: DTensor, index: Any) -> Tensor | None:
    """``x[index]`` for slices along the chunks; ``None`` for anything else."""
    index = index if isinstance(index, tuple) else (index,)
    if any(not (entry is Ellipsis or isinstance(entry, slice)) for entry in index):
        return None
    if Ellipsis in index:
        at = index.index(Ellipsis)
        fill = (slice(None),) * (x.ndim - len(index) + 1)
        index = (*index[:at], *fill, *index[at + 1 :])
    index = (*index, *(slice(None),) * (x.ndim - len(index)))
    dim, _, length = _parts(x)
    if any(entry != slice(None) for i, entry in enumerate(index) if i != dim):
        return None
    start, stop, step = index[dim].indices(x.shape[dim])
    if step != 1 or start % length or stop % length or stop <= start:
        return None
    return take(x, start // length, (stop - start) // length)
