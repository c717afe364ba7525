"""A rank's part of a run's state, as it is saved and loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.checkpoint.boxes import Box, boxes_of, whole
from paceline.checkpoint.manifest import TensorEntry
from paceline.errors import CheckpointError
from paceline.parallel.dtensor import held_runs, local


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and the memory on this rank that holds it (a view; any strides)."""

    box: Box
    tensor: Tensor


@dataclass(frozen=True)
class Part:
    """What one rank holds of a tensor of global ``shape``: some boxes, or none."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


def whole_part(tensor: Tensor) -> Part:
    """A tensor that this rank holds whole."""
    tensor = tensor.detach()
    shape = tuple(tensor.shape)
    return Part(shape, tensor.dtype, (Piece(whole(shape), tensor),))


def held_part(tensor: Tensor) -> Part:
    """What this rank holds of ``tensor``; shares its memory."""
    if not isinstance(tensor, DTensor):
        return whole_part(tensor)
    own = local(tensor).detach()
    pieces = tuple(
        Piece(box, own[inner.slices()] if own.ndim else own)
        for box, inner in boxes_of(held_runs(tensor))
    )
    return Part(tuple(tensor.shape), tensor.dtype, pieces)


def empty_for(entry: TensorEntry, like: Tensor | None) -> Tensor:
    """Memory for a saved tensor: cut as ``like`` is where it has its shape, else whole."""
    dtype = getattr(torch, entry.dtype)
    if like is not None and entry.shape == tuple(like.shape):
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(entry.shape, dtype=dtype)


def check_piece(name: str, part: Part, piece: Piece) -> None:
    """Raise unless ``piece`` is what it says to be, and can be read from and written into."""
    box, tensor = piece.box, piece.tensor
    problem = ""
    if len(box.offset) != len(part.shape) or any(
        offset < 0 or offset + length > size
        for offset, length, size in zip(box.offset, box.shape, part.shape, strict=True)
    ):
        problem = f"the box {box} does not lie in its shape {part.shape}"
    elif tuple(tensor.shape) != box.shape:
        problem = f"the box {box} is held by a tensor of shape {tuple(tensor.shape)}"
    elif tensor.dtype != part.dtype:
        problem = f"said to be of {part.dtype}, it is held by a tensor of {tensor.dtype}"
    elif type(tensor).__module__.startswith("torch.distributed.tensor"):
        problem = f"the box {box} is held by a DTensor: give its to_local()"
    elif tensor.layout != torch.strided or tensor.is_quantized:
        problem = f"the box {box} is held by a tensor that is sparse or quantized"
    elif tensor.is_meta:
        problem = f"the box {box} is on the meta device and holds no data"
    if problem:
        raise CheckpointError(f"tensor {name!r}: {problem}.")


@dataclass
class RankState:
    """What one rank gives to a save.

    ``tensors`` by name. Ranks that hold equal boxes of a tensor may all give them: one of them
    writes each. A name that only some ranks know is fine. ``objects``: plain values (numbers,
    strings, lists, dicts, small tensors) by name, each given by exactly one rank.
    """

    tensors: dict[str, Part] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)

    def structure(self) -> list[Any]:
        """All that a plan or a buffer for its tensors depends on; equal while that is unchanged."""
        return [
            (
                name,
                part.shape,
                part.dtype,
                [
                    (p.box, t.shape, t.dtype, t.device, t.layout, type(t))
                    for p in part.pieces
                    for t in (p.tensor,)
                ],
            )
            for name, part in self.tensors.items()
        ]
