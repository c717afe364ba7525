"""Values as modules pass them on: tensors inside tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def leaves(value: Any) -> list[Any]:
    """Everything in ``value`` that is not a container, in order."""
    found: list[Any] = []

    def keep(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    change_leaves(value, keep)
    return found


def tensors(value: Any) -> list[Tensor]:
    """The tensors in ``value``, in order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def change_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with ``change`` applied to its leaves.

    A container in which nothing changed stays the same object: a model may write into it.
    """
    if isinstance(value, tuple | list):
        items = [change_leaves(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, Mapping):
        fields = {key: change_leaves(item, change) for key, item in value.items()}
        if all(fields[key] is item for key, item in value.items()):
            return value
        if not isinstance(value, MutableMapping):
            return fields
        result = copy.copy(value)
        for key, item in fields.items():
            result[key] = item
        return result
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        old = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        fields = {name: change_leaves(item, change) for name, item in old.items()}
        changed = any(fields[name] is not item for name, item in old.items())
        return dataclasses.replace(value, **fields) if changed else value
    return change(value)
