"""The hash of ``counter.py`` in one pass over a GPU's memory; torch's operations take fifteen.

The arithmetic is the same, and so are the numbers. Triton comes with every build of torch for CUDA;
where it is missing, ``counter.py`` computes with torch's operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.randomness.keys import MULTIPLIERS

_M1, _M2, _M3 = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)
_BLOCK = 1024
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Those in which ``dropped`` computes what torch would: a kernel's numbers are float32."""


def hashed_at(first: Tensor, second: Tensor, positions: Tensor) -> Tensor:
    """The 32 bits of each number: a row for each key, a column for each position."""
    out = torch.empty(len(first), len(positions), dtype=torch.int32, device=first.device)
    with torch.cuda.device_of(out):
        _hash_kernel[_grid(out)](
            out, first.contiguous(), second.contiguous(), positions, len(positions), BLOCK=_BLOCK
        )
    return out


def dropped(
    given: Tensor, first: Tensor, second: Tensor, positions: Tensor, threshold: int, scale: float
) -> Tensor:
    """``given``, contiguous, with zeros where the number is below ``threshold``, scaled."""
    out = torch.empty_like(given)
    with torch.cuda.device_of(out):
        _dropped_kernel[_grid(out.view(len(first), len(positions)))](
            *(given, out, first.contiguous(), second.contiguous(), positions, len(positions)),
            *(threshold, scale),
            BLOCK=_BLOCK,
        )
    return out


def _grid(table: Tensor) -> tuple[int]:
    rows, columns = table.shape
    return (max(1, rows * triton.cdiv(columns, _BLOCK)),)


@triton.jit
def _hash(z, key):  # type: ignore[no-untyped-def]
    z ^= (z >> 17) & 0x7FFF
    z *= _M1
    z ^= key
    z ^= (z >> 11) & 0x1FFFFF
    z *= _M2
    z ^= (z >> 15) & 0x1FFFF
    z *= _M3
    z ^= (z >> 14) & 0x3FFFF
    return z


@triton.jit
def _numbers(first, second, positions, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's part of the table: its numbers, where they stand, and which there are."""
    blocks = tl.cdiv(columns, BLOCK)
    row = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    z = tl.load(positions + column, mask=inside, other=0) + tl.load(first + row)
    z = _hash(z, tl.load(second + row))
    return z, row.to(tl.int64) * columns + column, inside


@triton.jit
def _hash_kernel(out, first, second, positions, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    z, place, inside = _numbers(first, second, positions, columns, BLOCK)
    tl.store(out + place, z, mask=inside)


@triton.jit
def _dropped_kernel(  # type: ignore[no-untyped-def]
    given, out, first, second, positions, columns, threshold, scale, BLOCK: tl.constexpr
):
    z, place, inside = _numbers(first, second, positions, columns, BLOCK)
    x = tl.load(given + place, mask=inside, other=0.0).to(tl.float32)
    keep = (z >= threshold).to(tl.float32)
    tl.store(out + place, (x * keep * scale).to(out.dtype.element_ty), mask=inside)
