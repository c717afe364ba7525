"""Checks of single values, with the messages they give."""

from __future__ import annotations

from typing import Any

from paceline.errors import DataError


def whole_number(name: str, value: Any, least: int, meaning: str) -> int:
    """``value``, or :class:`DataError` unless it is a whole number from ``least`` up."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DataError(
            f"{name}={value!r} must be a whole number, {least} or more: it is the {meaning}."
        )
    return value


def check_rank(rank: object, size: object) -> None:
    """Raise :class:`DataError` unless ``0 <= rank < size``."""
    for name, value in (("rank", rank), ("size", size)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise DataError(f"{name}={value!r} must be a whole number.")
    assert isinstance(rank, int)
    assert isinstance(size, int)
    if size < 1:
        raise DataError(f"size={size} must be 1 or more: it is the number of ranks.")
    if not 0 <= rank < size:
        raise DataError(f"rank={rank} must be from 0 to size-1={size - 1}: ranks count from 0.")
