"""PowerSGD: a matrix sent as the product of two thin ones, better every step.

One step of a power iteration from where the last step's ended. For all matrices of an exchange at
once, so that there are two messages, not two for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.sync.compressed.formats import Cast, Format, Plain, Trip, Turn
from paceline.sync.wire import Wire


class Factored(NamedTuple):
    """What came of an exchange, by name; equal on all ranks."""

    left: dict[str, Tensor]
    right: dict[str, Tensor]
    """Where the next step starts, too."""

    def write(self, name: str, mean: Tensor) -> None:
        """Put the mean of a matrix into ``mean``, which has its shape."""
        left, right = self.left[name], self.right[name]
        if mean.is_contiguous():
            torch.mm(left, right.T, out=mean.view(as_matrix(mean.shape)))
        else:
            mean.copy_((left @ right.T).view(mean.shape))


@dataclass(frozen=True)
class PowerSGD:
    """Matrices of ``rank`` ``rank``; ``dtype`` is what the thin ones travel in."""

    rank: int
    seed: int = 0
    dtype: torch.dtype | None = None
    feedback = True

    def pays_for(self, shape: Sequence[int]) -> bool:
        """Whether two thin matrices are less than the one; else it travels as it is."""
        rows, columns = as_matrix(shape)
        return self.rank * (rows + columns) < rows * columns

    def means(
        self, matrices: Mapping[str, Tensor], right: Mapping[str, Tensor], wire: Wire, turn: Turn
    ) -> Factored:
        """The mean over the ranks of each matrix, as near as its rank allows, by name.

        ``right`` is what the last step gave; a name that is not in it starts at random.
        """
        form: Format = Plain() if self.dtype is None else Cast(self.dtype)
        flat = {name: m.reshape(as_matrix(m.shape)) for name, m in matrices.items()}
        left = {name: m @ self._start(right.get(name), m) for name, m in flat.items()}
        left = {name: _orthogonal(p) for name, p in _together(left, form, wire, turn).items()}
        thin = {name: m.T @ left[name] for name, m in flat.items()}
        return Factored(left, _together(thin, form, wire, turn))

    def _start(self, kept: Tensor | None, matrix: Tensor) -> Tensor:
        if kept is None or kept.shape != (matrix.shape[1], self.rank):
            draw = torch.Generator().manual_seed(self.seed)
            kept = torch.randn(matrix.shape[1], self.rank, generator=draw, dtype=torch.float64)
        return _orthogonal(kept.to(matrix))


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """A tensor's first dimension, and all the others."""
    rows = shape[0] if len(shape) > 1 else 1
    total = 1
    for length in shape:
        total *= length
    return rows, total // max(rows, 1)


def _orthogonal(thin: Tensor) -> Tensor:
    """An orthonormal basis of its columns."""
    return torch.linalg.qr(thin).Q


def _together(thin: dict[str, Tensor], form: Format, wire: Wire, turn: Turn) -> dict[str, Tensor]:
    """The means of several thin matrices, by one message."""
    row = torch.cat([t.flatten() for t in thin.values()])
    sent = form.mean(row, Trip(wire, turn, wants_own=False))
    parts = sent.mean.split([t.numel() for t in thin.values()])
    return {n: p.view_as(t) for (n, t), p in zip(thin.items(), parts, strict=True)}
