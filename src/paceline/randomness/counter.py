"""Random numbers by counting: each is a hash of a 64-bit key and a position, and of nothing else.

No state moves on, so any part of a tensor can be drawn anywhere, in any order, twice. The hash is
three rounds of xor-shift and multiply on 32 bits (the constants are Chris Wellons' ``triple32``),
with one half of the key added to the position before the first round, and the other half brought in
before the second. It is plain integer arithmetic on int32 tensors, which wraps around alike on a
CPU, on a GPU and in code that ``torch.compile`` makes of it.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.randomness.keys import MULTIPLIERS

_CHUNK = 1 << 16
"""Elements computed at once on a CPU: what fits into its cache beside the results."""
_SECOND_WORD = 0x5BD1E995
"""Turns the key of a draw into another one, where an element needs two words."""
_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


_M1, _M2, _M3 = MULTIPLIERS


def hashed(z: Tensor, key: Tensor | int) -> Tensor:
    """The hash of ``z`` (position plus first word of a key) with the second word; in place."""
    z ^= (z >> 17) & 0x7FFF
    z *= _M1
    z ^= key
    z ^= (z >> 11) & 0x1FFFFF
    z *= _M2
    z ^= (z >> 15) & 0x1FFFF
    z *= _M3
    z ^= (z >> 14) & 0x3FFFF
    return z


def sample_keys(samples: Tensor, base: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Both key words of each sample; ``samples`` are int32 numbers, ``base`` four words."""
    return hashed(samples + base[0], base[1]), hashed(samples + base[2], base[3])


class Numbers:
    """The numbers of one draw as a table: a row for each key, a column for each position.

    ``first`` and ``second`` are the words of the keys, one of each a row; ``positions`` says where
    each column stands in the whole tensor.
    """

    def __init__(self, first: Tensor, second: Tensor, positions: Tensor) -> None:
        self.first, self.second, self.positions = first, second, positions

    def keep(self, rate: float) -> Tensor:
        """True with a probability of ``1 - rate``."""
        return self._each(torch.bool, lambda z: z >= _threshold(rate))

    def dropped(self, given: Tensor, rate: float, scale: float) -> Tensor | None:
        """``given`` with what is not kept set to zero, scaled, where a GPU can do it at once."""
        if not has_kernels(given.device) or not given.is_contiguous():
            return None
        from paceline.randomness import gpu_kernels

        if given.dtype not in gpu_kernels.DTYPES or given.numel() == 0:
            return None
        about = self.first, self.second, self.positions
        return gpu_kernels.dropped(given, *about, _threshold(rate), scale)

    def words(self, number: int = 0) -> Tensor:
        """All 32 bits of each number, as int32; ``number`` 1 gives a second word."""
        return self._each(torch.int32, lambda z: z, number)

    def uniform(self, dtype: torch.dtype) -> Tensor:
        """From 0 up to, but not including, 1; all digits that ``dtype`` has below 1 are drawn."""
        digits = _DIGITS.get(dtype, 24)
        if digits <= 24:
            mask, scale = (1 << digits) - 1, 2.0**-digits
            wide = torch.float32
            drawn = self._each(wide, lambda z: ((z >> (32 - digits)) & mask).to(wide) * scale)
            return drawn.to(dtype)
        high = self._each(dtype, lambda z: z.to(dtype) + float(1 << 31))
        low = self._each(dtype, lambda z: ((z >> 11) & 0x1FFFFF).to(dtype), 1)
        return (high * float(1 << 21) + low) * 2.0**-53

    def normal(self, dtype: torch.dtype) -> Tensor:
        """With mean 0 and variance 1, by the method of Box and Muller."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        angle = self._each(wide, lambda z: z.to(wide) * (math.pi / (1 << 31)), 1)
        radius = (-2 * torch.log1p(-self.uniform(wide))).sqrt()
        return (radius * angle.cos()).to(dtype)

    def exponential(self, dtype: torch.dtype) -> Tensor:
        """With mean 1."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return -torch.log1p(-self.uniform(wide)).to(dtype)

    def _each(
        self, dtype: torch.dtype, finish: Callable[[Tensor], Tensor], word: int = 0
    ) -> Tensor:
        rows, columns = self.first.shape[0], self.positions.shape[0]
        second = self.second ^ _SECOND_WORD if word else self.second
        if rows * columns > 0 and has_kernels(self.first.device):
            from paceline.randomness import gpu_kernels

            return finish(gpu_kernels.hashed_at(self.first, second, self.positions))
        whole = rows * columns <= _CHUNK or self.first.device.type != "cpu"
        if torch.compiler.is_compiling() or whole:
            return finish(_hashed_at(self.first, second, self.positions))
        out = torch.empty(rows, columns, dtype=dtype)
        height = max(1, _CHUNK // columns)
        for row in range(0, rows, height):
            first, last = self.first[row : row + height], second[row : row + height]
            for column in range(0, columns, _CHUNK):
                positions = self.positions[column : column + _CHUNK]
                bits = _hashed_at(first, last, positions)
                out[row : row + height, column : column + _CHUNK] = finish(bits)
        return out


def has_kernels(device: torch.device) -> bool:
    """Whether numbers are computed by kernels of our own there; compiled code fuses by itself."""
    return device.type == "cuda" and not torch.compiler.is_compiling() and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _threshold(rate: float) -> int:
    """The number from which on, as an int32, a hash counts as kept."""
    return round(rate * (1 << 32)) - (1 << 31)


def _hashed_at(first: Tensor, second: Tensor, positions: Tensor) -> Tensor:
    return hashed(positions + first.unsqueeze(1), second.unsqueeze(1))
