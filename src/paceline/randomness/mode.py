"""Catches the calls of torch's random functions while a forward pass runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from paceline.randomness.drawing import Drawing
from paceline.randomness.draws import HANDLERS, INLINED, is_own_generator, tensors_of
from paceline.torch_internals import FakeTensor


class DrawMode(TorchFunctionMode):
    """Has ``randomness`` draw what torch would draw from its own streams."""

    def __init__(self, randomness: Drawing) -> None:
        super().__init__()
        self._randomness = randomness

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is None:
            if (
                func in INLINED
                and self._randomness.current is not None
                and not _split(args, kwargs)
            ):
                return self._inline(func, args, kwargs)
            return func(*args, **kwargs)
        randomness = self._randomness
        if randomness.current is None or is_own_generator(kwargs):
            return func(*args, **kwargs)
        if not torch.compiler.is_compiling():
            if _split(args, kwargs):
                # Tensor parallelism knows the parts, and calls back for each of them.
                return func(*args, **kwargs)
            given = tensors_of(args, kwargs)
            if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in given):
                return self._count(handler, func, args, kwargs)
        result = handler(randomness, func, args, kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result

    def _count(self, handler: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A draw on tensors without data, as stages of a pipeline run code of earlier ones."""
        self._randomness.only_counts = True
        try:
            handler(self._randomness, func, args, kwargs)
        finally:
            self._randomness.only_counts = False
        return func(*args, **kwargs)

    def _inline(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A function of torch that is written in Python: what it calls in turn is caught."""
        randomness = self._randomness
        before, randomness.assume_computed = randomness.assume_computed, True
        try:
            with self:
                return INLINED[func](*args, **kwargs)
        finally:
            randomness.assume_computed = before


def _split(args: Any, kwargs: dict[str, Any]) -> bool:
    if torch.compiler.is_compiling():
        return False
    return any(isinstance(tensor, DTensor) for tensor in tensors_of(args, kwargs))
