"""Words of 32 bits that go into the hash of ``counter.py``: its constants, and keys."""

from __future__ import annotations

import hashlib
from typing import Any

_MASK = 0xFFFFFFFF


def signed(value: int) -> int:
    """The low 32 bits of ``value`` as an int32 holds them."""
    value &= _MASK
    return value - (1 << 32) if value >= 1 << 31 else value


MULTIPLIERS = signed(0xED5AD4BB), signed(0xAC4C1B51), signed(0x31848BAB)
"""Of the hash's three rounds, as int32."""


def words(count: int, *about: Any) -> tuple[int, ...]:
    """``count`` (at most 16) well-mixed int32 numbers that follow from ``about``."""
    digest = hashlib.blake2b(repr(about).encode(), digest_size=4 * count).digest()
    return tuple(
        int.from_bytes(digest[4 * i : 4 * i + 4], "little", signed=True) for i in range(count)
    )
