"""What reductions compute, in one place for every device and dtype.

Sums are taken in the order of ranks, 16-bit floats in float32 and rounded once: the result depends
neither on how tensors were put together nor on when they arrived.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch

from paceline.compat.horovod.common.reduce_ops import Average, Max, Min, Sum

_HALF = (torch.float16, torch.bfloat16)
_TINY = math.sqrt(sys.float_info.min)
"""Below this a squared norm counts as zero."""


def scale(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """``tensor`` times ``factor`` as Horovod multiplies: whole numbers in float64, cut off."""
    if factor == 1.0:
        return tensor
    if tensor.dtype in _HALF:
        return (tensor.float() * factor).to(tensor.dtype)
    if tensor.is_floating_point():
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in the dtype that sums of it are taken in."""
    return tensor.float() if tensor.dtype in _HALF else tensor


def combine(pieces: Sequence[torch.Tensor], op: int) -> torch.Tensor:
    """The reduction of equal-shaped ``pieces`` in their order, not rounded to 16 bits yet."""
    total = widened(pieces[0]).clone()
    for piece in pieces[1:]:
        other = widened(piece)
        if op == Min:
            total = torch.minimum(total, other)
        elif op == Max:
            total = torch.maximum(total, other)
        elif total.dtype == torch.bool:
            total = total | other if op in (Sum, Average) else total & other
        elif op in (Sum, Average):
            total += other
        else:
            total *= other
    return total


def adasum_pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Two gradients in one: their sum where orthogonal, their mean where parallel."""
    wide_a, wide_b = a.double().reshape(-1), b.double().reshape(-1)
    dot = torch.dot(wide_a, wide_b)
    norm_a, norm_b = torch.dot(wide_a, wide_a), torch.dot(wide_b, wide_b)
    one = torch.ones_like(dot)
    share_a = torch.where(norm_a >= _TINY, 1 - dot / norm_a / 2, one)
    share_b = torch.where(norm_b >= _TINY, 1 - dot / norm_b / 2, one)
    return (share_a * wide_a + share_b * wide_b).to(a.dtype).reshape(a.shape)


def rows_of(first_dim: int, size: int) -> list[int]:
    """How many rows of ``first_dim`` each of ``size`` ranks gets: the first ones one more."""
    share, rest = divmod(first_dim, size)
    return [share + (rank < rest) for rank in range(size)]
