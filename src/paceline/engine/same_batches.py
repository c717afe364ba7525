"""Ranks that work on the same samples must be given the same batches."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from paceline.data.batch_layout import check_origin
from paceline.engine.batch import map_leaves
from paceline.errors import DataError
from paceline.layout import Layout
from paceline.world import World, collectives


class SameBatches:
    """Whether an engine's batches are shared out as its layout wants it."""

    def __init__(self, layout: Layout, world: World) -> None:
        self._layout, self._world = layout, world
        self._has_peers = layout.dp < world.size
        self._batches = 0

    def check(self, batch: Any) -> None:
        """Raise on all ranks where ``batch`` was cut for another layout, or peers got others.

        Ranks that share samples compare the contents of batches 1, 2, 4, 8, …: batches need not
        come from a loader that compares its own.
        """
        check_origin(batch, self._layout)
        self._batches += 1
        if self._has_peers and self._batches & (self._batches - 1) == 0:
            check_same_batch(batch, self._layout, self._world)


def check_same_batch(batch: Any, layout: Layout, world: World) -> None:
    """Raise on all ranks where two that share samples (``tp``, ``pp``) got other ones."""
    prints = collectives.all_gather_object(_fingerprint(batch))
    first: dict[int, int] = {}
    for rank in range(world.size):
        other = first.setdefault(layout.coordinate(rank).dp, rank)
        if prints[rank] != prints[other]:
            raise DataError(
                f"layout {str(layout)!r}: ranks {other} and {rank} work on the same samples, but "
                "got different batches. Draw them with paceline.loader(..., layout=engine.layout),"
                " or with a sampler over the data-parallel ranks alone (engine.coordinate.dp of "
                "engine.layout.dp)."
            )


def _fingerprint(batch: Any) -> str:
    digest = hashlib.sha256()

    def add(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            digest.update(str((leaf.dtype, tuple(leaf.shape))).encode())
            dense = leaf.detach().cpu().to_dense() if leaf.is_sparse else leaf.detach().cpu()
            digest.update(dense.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return leaf

    map_leaves(batch, add)
    return digest.hexdigest()
