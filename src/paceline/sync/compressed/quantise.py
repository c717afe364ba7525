"""Numbers as small integers with a scale for each block of them.

Rounding is to the nearest: with error feedback what is lost is sent later, so that no dither is
needed, and the same numbers always make the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.sync.compressed.packing import pack_signs, unpack_signs

INT8_BLOCK = 1024
SIGN_BLOCK = 128
"""Smaller: a sign says nothing of a number's size, so that its scale has to fit all the better."""
_LEVEL = 1 / 127
"""Of the largest number. Multiplied with: CUDA divides by a constant otherwise than a CPU does."""


def blocks_of(size: int, block: int) -> int:
    """How many blocks, each with a scale of its own, ``size`` numbers make."""
    return -(-size // block)


def to_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """``values`` (flat) as int8, and a float32 scale for every block."""
    padded = _padded(values, INT8_BLOCK).view(-1, INT8_BLOCK)
    least, most = padded.aminmax(dim=1)
    scales = torch.maximum(most, -least).to(torch.float32) * _LEVEL
    steps = torch.where(scales > 0, scales, 1.0).unsqueeze(1)
    codes = (padded / steps.to(padded.dtype)).round_().to(torch.int8)
    return codes.view(-1)[: values.numel()], scales


def from_int8(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that :func:`to_int8` gave, as near as it kept them."""
    padded = _padded(codes, INT8_BLOCK).view(-1, INT8_BLOCK).to(dtype)
    return padded.mul_(scales.to(dtype).unsqueeze(1)).view(-1)[: codes.numel()]


def to_signs(values: Tensor) -> tuple[Tensor, Tensor]:
    """The packed signs of ``values`` (flat), and the mean size of each block as float32."""
    padded = _padded(values, SIGN_BLOCK).view(-1, SIGN_BLOCK)
    scales = padded.abs().sum(1).to(torch.float32)
    counts = torch.full_like(scales, SIGN_BLOCK)
    if (rest := values.numel() % SIGN_BLOCK) != 0:
        counts[-1] = rest
    return pack_signs(values), scales / counts


def from_signs(packed: Tensor, scales: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Each sign times the mean size of its block."""
    signs = _padded(unpack_signs(packed, count, dtype), SIGN_BLOCK).view(-1, SIGN_BLOCK)
    return signs.mul_(scales.to(dtype).unsqueeze(1)).view(-1)[:count]


def _padded(values: Tensor, block: int) -> Tensor:
    missing = -values.numel() % block
    return torch.cat([values, values.new_zeros(missing)]) if missing else values
