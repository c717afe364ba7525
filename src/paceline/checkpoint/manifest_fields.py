"""What a manifest may hold, field by field: its hash says that it is whole, not that it is sound.

Whoever writes a manifest can write its hash, too. So each field is looked at before anything is
made of it. All functions raise ``ValueError`` that names the field, what it must be and what it is.
Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.untrusted import MIB

MOST_BYTES = 256 * MIB
"""The largest manifest: that of a checkpoint of some 30 TB."""
MOST_BLOCK = 64 * MIB
"""The largest block: one is held in memory, whole, by each thread that reads."""

_MOST = 2**63 - 1
_MOST_DIMENSIONS = 64
_DEEPEST = 32
_SHOWN = 60


def member(content: Any, key: str) -> Any:
    """The value under ``key`` of what must be an object that has it."""
    if not isinstance(content, Mapping):
        raise ValueError(f"it must hold an object, not {_short(content)}")
    if key not in content:
        raise ValueError(f"it has no field {key!r}")
    return content[key]


def count(value: Any, field: str, *, least: int = 0, most: int = _MOST) -> int:
    """A whole number from ``least`` to ``most``."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(
            f"{field} must be a whole number from {least} to {most}, not {_short(value)}"
        )
    return value


def text(value: Any, field: str) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError(f"{field} must be a text, not {_short(value)}")
    return value


def mapping(value: Any, field: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{field} must be an object, not {_short(value)}")
    return value


def array(value: Any, field: str, length: int | None = None) -> list[Any]:
    """A JSON array, of ``length`` elements where that is given."""
    if not isinstance(value, list) or length not in (None, len(value)):
        of = "" if length is None else f" of {length}"
        raise ValueError(f"{field} must be an array{of}, not {_short(value)}")
    return value


def counts(value: Any, field: str) -> tuple[int, ...]:
    """A shape or an offset: whole numbers, not too many of them."""
    found = array(value, field)
    if len(found) > _MOST_DIMENSIONS:
        raise ValueError(f"{field} has {len(found)} dimensions; {_MOST_DIMENSIONS} at most")
    sizes = tuple(count(one, field) for one in found)
    if math.prod(max(size, 1) for size in sizes) > _MOST:
        raise ValueError(f"{field} = {_short(value)} has more elements than can be counted")
    return sizes


def file_entry(value: Any, field: str) -> tuple[int, int, tuple[str, ...]]:
    """The size of a file, of its blocks, and the hash of each block."""
    size, block, hashes = array(value, field, 3)
    found = tuple(array(hashes, f"{field}, hashes"))
    if not all(isinstance(one, str) for one in found):
        raise ValueError(f"{field}, hashes must be texts")
    return (
        count(size, f"{field}, size"),
        count(block, f"{field}, block", most=MOST_BLOCK),
        found,
    )


def check_box(offset: Sequence[int], shape: Sequence[int], whole: Sequence[int], name: str) -> None:
    """Whether elements of the tensor ``name`` lie in it, whose shape is ``whole``."""
    inside = len(offset) == len(shape) == len(whole) and all(
        first + length <= size for first, length, size in zip(offset, shape, whole, strict=True)
    )
    if not inside:
        raise ValueError(
            f"tensor {_short(name)}: elements of shape {_short(list(shape))} at "
            f"{_short(list(offset))} are not inside of its shape {_short(list(whole))}"
        )


def info(value: Any) -> dict[str, Any]:
    """What is there for people; the metrics in it are for retention as well."""
    found = mapping(value, "info")
    if _depth(found) > _DEEPEST:
        raise ValueError(f"info is nested more than {_DEEPEST} deep")
    for name, metric in mapping(found.get("metrics") or {}, "info, metrics").items():
        if isinstance(metric, int) and not -_MOST <= metric <= _MOST:
            raise ValueError(f"info, metrics, {_short(name)}: {_short(metric)} is too large")
    return found


def too_large(where: str, size: int) -> str:
    """Why a manifest is not even read."""
    return f"{where} is damaged: it has {size} bytes, and a manifest has at most {MOST_BYTES}."


def _depth(value: Any) -> int:
    """How many objects and arrays lie in one another; without recursion."""
    depth, level = 0, [value]
    while level and depth <= _DEEPEST:
        inner = [one for one in level if isinstance(one, dict | list)]
        depth += bool(inner)
        level = [v for one in inner for v in (one.values() if isinstance(one, dict) else one)]
    return depth


def _short(value: Any) -> str:
    if isinstance(value, int) and not -_MOST <= value <= _MOST:
        return "a number beyond all bounds"
    if isinstance(value, dict | list):
        value = [*value][:20]  # enough to be cut below
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 1]}…"
