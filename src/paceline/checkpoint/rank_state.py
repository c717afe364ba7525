"""A rank's part of a run's state, as it is saved and loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.boxes import Box, whole


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
