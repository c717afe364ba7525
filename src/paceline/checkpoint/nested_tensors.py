"""Nested values with tensors in them, taken apart for a checkpoint and put together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

_MARK = "paceline tensor"
_LARGE = 4096
"""Bytes from which on a tensor is saved by itself."""


def take_apart(tree: Any, wanted: Callable[[Tensor], bool]) -> tuple[Any, dict[str, Tensor]]:
    """``tree`` with a mark in the place of each ``wanted`` tensor, and those tensors by path."""
    tensors: dict[str, Tensor] = {}

    def walk(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, Tensor) and wanted(value):
            name = "/".join(path) or "tensor"
            while name in tensors:  # the keys 1 and "1" look alike
                name += "'"
            tensors[name] = value
            return (_MARK, name)
        if isinstance(value, Mapping):
            return {key: walk(child, (*path, str(key))) for key, child in value.items()}
        if type(value) in (list, tuple):
            return type(value)(walk(c, (*path, str(i))) for i, c in enumerate(value))
        return value

    return walk(tree, ()), tensors


def put_together(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What ``take_apart`` took apart."""
    if isinstance(tree, tuple) and len(tree) == 2 and tree[0] == _MARK:
        return tensors[tree[1]]
    if isinstance(tree, Mapping):
        return {key: put_together(child, tensors) for key, child in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(put_together(child, tensors) for child in tree)
    return tree


def is_large(tensor: Tensor) -> bool:
    """Whether a tensor is worth an entry of its own in a checkpoint."""
    return tensor.numel() * tensor.element_size() >= _LARGE
