"""Values nested in containers: the one place that knows how to look into them and rebuild them.

Containers are tuples, named tuples, lists, mappings and dataclasses, with their subclasses: a
batch, the arguments of a module, what a model returns. Everything else is a leaf. Hugging Face's
``ModelOutput`` is a dataclass and a mapping; it is treated as a mapping and keeps its class.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

IsLeaf = Callable[[Any], bool]
"""Says of a value whether to pass it on as it is, container or not."""


def leaves(
    value: Any, *, is_leaf: IsLeaf | None = None, every_field: bool = False
) -> Iterator[Any]:
    """Everything in ``value`` that is not a container, in order.

    Of a dataclass these are the fields that its ``__init__`` takes, which ``map_leaves`` can
    change; with ``every_field`` the others too.
    """
    parts = None if is_leaf is not None and is_leaf(value) else parts_of(value, every_field)
    if parts is None:
        yield value
        return
    for part in parts.values():
        yield from leaves(part, is_leaf=is_leaf, every_field=every_field)


def named_leaves(
    value: Any, path: str, *, is_leaf: IsLeaf | None = None
) -> Iterator[tuple[str, Any]]:
    """The leaves of ``value`` with where they are, such as ``batch["image"][0]``."""
    parts = None if is_leaf is not None and is_leaf(value) else parts_of(value)
    if parts is None:
        yield path, value
        return
    by_name = not isinstance(value, Mapping | list) and not _is_plain_tuple(value)
    for key, part in parts.items():
        step = f".{key}" if by_name else f"[{key!r}]"
        yield from named_leaves(part, path + step, is_leaf=is_leaf)


def map_leaves(
    value: Any, change: Callable[[Any], Any], *, is_leaf: IsLeaf | None = None, fresh: bool = False
) -> Any:
    """``value`` with ``change`` applied to its leaves; containers keep their classes.

    A container in which nothing changed stays the same object, since a model may write into it.
    With ``fresh`` every container is a new one, so that writing does not reach the caller's.
    """
    parts = None if is_leaf is not None and is_leaf(value) else parts_of(value)
    if parts is None:
        return change(value)
    changed = {
        key: map_leaves(part, change, is_leaf=is_leaf, fresh=fresh) for key, part in parts.items()
    }
    if not fresh and all(changed[key] is part for key, part in parts.items()):
        return value
    return with_parts(value, changed)


def tensors(value: Any, *, every_field: bool = False) -> Iterator[Tensor]:
    """The tensors in ``value``, in order; see ``leaves``."""
    for leaf in leaves(value, every_field=every_field):
        if isinstance(leaf, Tensor):
            yield leaf


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """``value`` with ``change`` applied to the tensors in it; see ``map_leaves``."""
    return map_leaves(value, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def parts_of(value: Any, every_field: bool = False) -> dict[Any, Any] | None:
    """What a container holds, by key, index or name of the field; ``None`` for a leaf."""
    if isinstance(value, tuple | list):
        names = getattr(value, "_fields", None)
        return dict(zip(range(len(value)) if names is None else names, value, strict=True))
    if isinstance(value, Mapping):
        return dict(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f for f in dataclasses.fields(value) if f.init or every_field]
        return {f.name: getattr(value, f.name, None) for f in fields}
    return None


def with_parts(value: Any, parts: dict[Any, Any]) -> Any:
    """A container like ``value`` that holds ``parts``, which have the keys of ``parts_of``."""
    if isinstance(value, list):
        return _list_like(value, list(parts.values()))
    if isinstance(value, tuple):
        return _tuple_like(value, list(parts.values()))
    if isinstance(value, Mapping):
        return _mapping_like(value, parts)
    return dataclasses.replace(value, **parts)


def _is_plain_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and not hasattr(value, "_fields")


def _list_like(value: list[Any], items: list[Any]) -> list[Any]:
    if type(value) is list:
        return items
    made = copy.copy(value)  # keeps what the subclass carries beside its items
    made[:] = items
    return made


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> Any:
    if type(value) is tuple:
        return tuple(items)
    kind: Any = type(value)
    if hasattr(value, "_fields"):
        return kind(*items)
    # Of other subclasses some take their items one by one, and torch.Size takes numbers alone.
    for make in (lambda: kind(items), lambda: kind(*items)):
        try:
            made = make()
        except TypeError:
            continue
        if len(made) == len(items) and all(a is b for a, b in zip(made, items, strict=True)):
            return made
    return tuple(items)


def _mapping_like(value: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    if type(value) is dict or not isinstance(value, MutableMapping):
        return parts
    made = copy.copy(value)  # keeps what a dict would lose: BatchEncoding, ModelOutput, UserDict
    for key, part in parts.items():
        made[key] = part
    return made
