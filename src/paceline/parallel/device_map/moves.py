"""Bringing tensors together on one device: inputs of a module, operands of an operator."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from paceline.nested import map_leaves, tensors


def moved(value: Any, device: torch.device) -> Any:
    """``value`` with every tensor inside it on ``device``; itself where that is so already."""

    def to_device(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            packed: Any = leaf
            return packed if packed.data.device == device else packed.to(device)
        return leaf.to(device) if isinstance(leaf, Tensor) and leaf.device != device else leaf

    # A packed sequence is a tuple of which one part belongs on the CPU.
    return map_leaves(value, to_device, is_leaf=lambda part: isinstance(part, PackedSequence))


def device_of(value: Any) -> torch.device | None:
    """The device of the first tensor inside ``value``, if it holds any."""
    first = next(tensors(value, every_field=True), None)
    return None if first is None else first.device


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
        devices = {tensor.device for tensor in _operands((args, kwargs))}
        if len(devices) > 1 and not _moves(func):
            target = _target(func, args, kwargs)
            args, kwargs = moved(args, target), moved(kwargs, target)
        return func(*args, **kwargs)


def _moves(func: Any) -> bool:
    """Whether ``func`` itself goes between devices, or sets an attribute of what it is given."""
    return func in (Tensor.to, Tensor.copy_, Tensor.type_as) or func.__name__ == "__set__"


def _operands(value: Any) -> Iterator[Tensor]:
    for tensor in tensors(value):
        if tensor.ndim or tensor.device.type != "cpu":
            yield tensor


def _target(func: Any, args: Any, kwargs: Mapping[str, Any]) -> torch.device:
    name = getattr(func, "__name__", "")
    changes_first = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if "out" in kwargs:
        return next(_operands(kwargs["out"])).device
    if changes_first or name.startswith("__i"):
        return next(_operands(args)).device
    return max(_operands((args, kwargs)), key=lambda tensor: tensor.nbytes).device
