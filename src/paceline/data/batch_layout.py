"""Where a batch comes from: the layout it was cut for, and its place in the global batch.

An engine on another layout refuses it; and random numbers go by a sample's place. Kept for as long
as the batch's first tensor lives: a batch that was changed on the way has no known origin.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import torch

from paceline.errors import DataError
from paceline.layout import Layout
from paceline.nested import tensors


class Origin(NamedTuple):
    """What is known of a batch that a loader has yielded."""

    tensor: weakref.ref[torch.Tensor]
    layout: Layout | None
    start: int | None
    """The place of its first sample in the global batch."""


_origins: dict[int, Origin] = {}


def remember(batch: Any, layout: Layout | None, start: int | None = None) -> None:
    """Note that ``batch`` was cut for ``layout``, from sample ``start`` of the global batch on."""
    tensor = next(tensors(batch, every_field=True), None)
    if tensor is not None:
        key = id(tensor)
        alive = weakref.ref(tensor, lambda _: _origins.pop(key, None))
        _origins[key] = Origin(alive, layout, start)


def start_of(batch: Any) -> int | None:
    """The place of the batch's first sample in the global batch, where a loader has yielded it."""
    origin = _origin(batch)
    return None if origin is None else origin.start


def _origin(batch: Any) -> Origin | None:
    tensor = next(tensors(batch, every_field=True), None)
    known = None if tensor is None else _origins.get(id(tensor))
    return known if known is not None and known.tensor() is tensor else None


def check_origin(batch: Any, layout: Layout) -> None:
    """Raise where ``batch`` came from a loader that shares samples out in another way."""
    origin = _origin(batch)
    if origin is not None and origin.layout is not None:
        check_shares("the batch was cut", origin.layout, layout)


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
