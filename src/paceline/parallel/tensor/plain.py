"""Turning what a model returns back into plain, whole tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.parallel.tensor.shards import gathered


def plain(value: Any) -> Any:
    """``value`` with every split tensor in it replaced by the whole, plain one; differentiable.

    Looks into mappings, sequences and dataclasses. What holds no split tensor is returned as it
    is. A collective where something is split.
    """
    if isinstance(value, DTensor):
        return gathered(value)
    if isinstance(value, Tensor | str | bytes):
        return value
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, tuple | list):
        items = [plain(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value)
    return value


def _mapping(value: Mapping[Any, Any]) -> Any:
    items = {key: plain(item) for key, item in value.items()}
    changed = {key: item for key, item in items.items() if item is not value[key]}
    if not changed:
        return value
    if type(value) is dict:
        return items
    made: Any = copy.copy(value)  # keeps the class, as of Hugging Face's model outputs
    for key, item in changed.items():
        made[key] = item
    return made


def _dataclass(value: Any) -> Any:
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    items = {name: plain(item) for name, item in fields.items()}
    changed = {name: item for name, item in items.items() if item is not fields[name]}
    return dataclasses.replace(value, **changed) if changed else value
