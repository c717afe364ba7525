"""Numbers packed into bytes for the wire: signs, positions of a few elements, small integers.

Pure functions between tensors on any device. What one packs, its neighbour unpacks exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = (1, 2, 4, 8, 16, 32, 64, 128)
POSITIONS_PER_BLOCK = 1 << 16
"""Positions are kept as 16 bits within blocks of this many elements."""


def pack_signs(values: Tensor) -> Tensor:
    """One bit an element, set where the element is not negative; eight to a byte."""
    bits = (values.flatten() >= 0).to(torch.uint8)
    missing = -len(bits) % 8
    if missing:
        bits = torch.cat([bits, bits.new_zeros(missing)])
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=bits.device)
    return (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def unpack_signs(packed: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """``count`` numbers that are 1 or -1, from what ``pack_signs`` gave."""
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=packed.device)
    bits = packed.unsqueeze(1).bitwise_and(weights).ne(0).view(-1)[:count]
    return bits.to(dtype).mul_(2).sub_(1)


def pack_positions(positions: Tensor, size: int) -> Tensor:
    """Ascending ``positions`` in ``range(size)`` as bytes: two each, and four for every block."""
    block = positions // POSITIONS_PER_BLOCK
    counts = torch.zeros(blocks_of(size), dtype=torch.int32, device=block.device)
    counts.index_add_(0, block, torch.ones_like(block, dtype=torch.int32))
    # uint16 has few operators: the low 16 bits, as the int16 with the same bytes.
    low = (positions % POSITIONS_PER_BLOCK).to(torch.int32)
    halves = torch.where(low > 32767, low - 65536, low).to(torch.int16)
    return torch.cat([counts.view(torch.uint8), halves.view(torch.uint8)])


def unpack_positions(packed: Tensor, count: int, size: int) -> Tensor:
    """The positions, from what ``pack_positions`` gave for ``count`` of them."""
    blocks = blocks_of(size)
    counts = packed[: 4 * blocks].view(torch.int32)
    halves = packed[4 * blocks :].view(torch.int16).to(torch.int64)
    low = torch.where(halves < 0, halves + 65536, halves)
    block = torch.repeat_interleave(
        torch.arange(blocks, device=packed.device), counts.to(torch.int64), output_size=count
    )
    return block * POSITIONS_PER_BLOCK + low


def packed_positions_size(count: int, size: int) -> int:
    """The bytes that ``pack_positions`` makes of ``count`` positions."""
    return 4 * blocks_of(size) + 2 * count


def blocks_of(size: int) -> int:
    """How many blocks of positions there are in ``range(size)``."""
    return -(-size // POSITIONS_PER_BLOCK)
