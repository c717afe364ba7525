"""Which layout a batch was cut for, so that an engine on another one can refuse it.

Kept for as long as the batch's first tensor lives, and asked for by the engine that is given it.
It steers nothing: a batch that was changed on the way has no known origin.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from paceline.errors import DataError
from paceline.layout import Layout
from paceline.nested import tensors

_origins: dict[int, tuple[weakref.ref[torch.Tensor], Layout]] = {}


def remember(batch: Any, layout: Layout) -> None:
    """Note that ``batch`` was cut for ``layout``."""
    tensor = next(tensors(batch, every_field=True), None)
    if tensor is not None:
        key = id(tensor)
        _origins[key] = (weakref.ref(tensor, lambda _: _origins.pop(key, None)), layout)


def check_origin(batch: Any, layout: Layout) -> None:
    """Raise where ``batch`` came from a loader that shares samples out in another way."""
    tensor = next(tensors(batch, every_field=True), None)
    known = None if tensor is None else _origins.get(id(tensor))
    if known is not None and known[0]() is tensor:
        check_shares("the batch was cut", known[1], layout)


def check_shares(what: str, cut_for: Layout, layout: Layout) -> None:
    """Raise on all ranks alike unless both layouts give every rank the same share of a batch."""
    if cut_for == layout or _shares(cut_for) == _shares(layout):
        return
    raise DataError(
        f"{what} for layout {str(cut_for)!r}, in shares for {_ranks(cut_for)}, but the engine "
        f"has layout {str(layout)!r} with {_ranks(layout)}, where samples would be lost or count "
        "twice. Make the loader with paceline.loader(..., layout=engine.layout): one loader for "
        "each layout."
    )


def _ranks(layout: Layout) -> str:
    return f"{layout.dp} data-parallel rank{'' if layout.dp == 1 else 's'}"


@functools.lru_cache(maxsize=64)
def _shares(layout: Layout) -> tuple[int, ...]:
    return tuple(layout.coordinate(rank).dp for rank in range(layout.world_size))
