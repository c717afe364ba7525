"""Bringing tensors together on one device: inputs of a module, operands of an operator."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode


def moved(value: Any, device: torch.device) -> Any:
    """``value`` with every tensor inside it on ``device``; itself where that is so already."""
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device)
    if isinstance(value, PackedSequence):  # a tuple of which one part belongs on the CPU
        return value if value.data.device == device else _packed(value, device)
    if isinstance(value, tuple | list):
        items = [moved(item, device) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items) if type(value) in (tuple, list) else _refilled(value, items)
    if isinstance(value, Mapping):
        return _moved_mapping(value, device)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        new = {name: moved(item, device) for name, item in own.items()}
        if all(new[name] is own[name] for name in own):
            return value
        return dataclasses.replace(value, **new)
    return value


def _packed(value: Any, device: torch.device) -> Any:
    return value.to(device)


def _moved_mapping(value: Mapping[Any, Any], device: torch.device) -> Any:
    items = {key: moved(item, device) for key, item in value.items()}
    if all(items[key] is item for key, item in value.items()):
        return value
    if isinstance(value, MutableMapping):
        result = copy.copy(value)  # keeps what a plain dict would lose
        for key, item in items.items():
            result[key] = item
        return result
    return items


def _refilled(value: Any, items: list[Any]) -> Any:
    """A list or tuple of another class, with other items; some classes take them one by one."""
    try:
        return type(value)(items)
    except TypeError:
        return type(value)(*items)


def device_of(value: Any) -> torch.device | None:
    """The device of the first tensor inside ``value``, if it holds any."""
    if isinstance(value, Tensor):
        return value.device
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, tuple | list):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = (getattr(value, f.name) for f in dataclasses.fields(value))
    for item in items:
        found = device_of(item)
        if found is not None:
            return found
    return None


class Align(TorchFunctionMode):
    """Moves the operands of a torch call to one device: that of the largest.

    A call that changes its first operand takes the others to it instead. Scalars on the CPU are
    left alone, as torch takes them anywhere.
    """

    _active = threading.local()

    @classmethod
    @contextlib.contextmanager
    def once(cls) -> Iterator[None]:
        """Open the mode unless it is open already: modules inside modules need one."""
        if getattr(cls._active, "yes", False):
            yield
            return
        cls._active.yes = True
        try:
            with cls():
                yield
        finally:
            cls._active.yes = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        devices = {tensor.device for tensor in _operands(args, kwargs)}
        if len(devices) > 1 and not _moves(func):
            target = _target(func, args, kwargs)
            args, kwargs = moved(args, target), moved(kwargs, target)
        return func(*args, **kwargs)


def _moves(func: Any) -> bool:
    """Whether ``func`` itself goes between devices, or sets an attribute of what it is given."""
    return func in (Tensor.to, Tensor.copy_, Tensor.type_as) or func.__name__ == "__set__"


def _operands(args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            if value.ndim or value.device.type != "cpu":
                yield value
        elif isinstance(value, list | tuple):
            yield from _operands(value, {})


def _target(func: Any, args: Any, kwargs: Mapping[str, Any]) -> torch.device:
    name = getattr(func, "__name__", "")
    changes_first = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if "out" in kwargs:
        return next(_operands([kwargs["out"]], {})).device
    if changes_first or name.startswith("__i"):
        return next(_operands(args, {})).device
    return max(_operands(args, kwargs), key=lambda tensor: tensor.nbytes).device
