"""What shapes a batch will lead to: equal signatures, equal shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.nested import map_leaves


def signature(part: Any) -> tuple[Any, ...]:
    """Names, shapes and dtypes of the tensors in ``part``, and the values that are no tensors."""
    found: list[Any] = []

    def add(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            found.append((tuple(leaf.shape), leaf.dtype, str(leaf.device)))
        elif isinstance(leaf, int | float | bool | str | bytes | type(None)):
            found.append((type(leaf).__name__, leaf))
        else:
            found.append(type(leaf).__name__)
        return leaf

    map_leaves(part, add)
    keys = tuple(map(str, part)) if isinstance(part, Mapping) else ()
    return (type(part).__name__, keys, *found)
