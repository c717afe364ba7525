"""Which calls on split tensors DTensor can carry out, decided before they run.

A call that DTensor has no rule for is computed whole, which takes other collectives than computing
it split. So the ranks must decide alike: each tries the call on tensors without data that depend
on nothing but the function, the whole shapes and how they are split, which are the same everywhere.
What then goes wrong in the call itself, on one rank or on all, is raised as it is.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from paceline.nested import leaves, map_tensors, tensors
from paceline.parallel.tensor.shards import first_part_shape, wrap_all
from paceline.torch_internals import FAKE_TENSOR_LOGGER, FakeTensorMode


class SplitForms:
    """What has been decided so far; ``whole`` says of functions that are computed whole why."""

    def __init__(self) -> None:
        self._decided: dict[Any, bool] = {}
        self.whole: dict[str, str] = {}

    def has(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether ``func`` can be computed on split tensors as they are."""
        if torch.compiler.is_compiling():
            return True  # what cannot is not compiled, and comes here again
        with torch.no_grad():
            key = (func, *map(_looks, leaves((args, kwargs))))
        if key not in self._decided:
            why = _try(func, args, kwargs)
            self._decided[key] = why is None
            if why is not None:
                self.whole.setdefault(getattr(func, "__name__", str(func)), why)
        return self._decided[key]


def _looks(value: Any) -> Any:
    """What a decision goes by: of tensors, all but the values."""
    if isinstance(value, DTensor):
        local = value.to_local()
        return (value.shape, value.dtype, value.placements, value.device_mesh, _order(local))
    if isinstance(value, Tensor):
        return (value.shape, value.dtype, value.device.type, _order(value))
    if isinstance(value, slice):
        return ("slice", value.start, value.stop, value.step)
    try:
        hash(value)
    except TypeError:
        return str(value)
    return (type(value), value)


def _order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions as they lie in memory, outermost first; those that only repeat come last."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.ndim), key=lambda dim: (strides[dim] == 0, -strides[dim])))


def _try(func: Any, args: Any, kwargs: dict[str, Any]) -> str | None:
    """Why ``func`` has no split form; ``None`` if it has."""
    mode = FakeTensorMode()

    def without_data(tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        shape = first_part_shape(tensor)
        with mode:
            fake = _empty(local, shape)
        if not isinstance(tensor, DTensor):
            return fake
        return wrap_all(fake, tensor)

    try:
        with torch.no_grad(), _quiet(), _same_randomness():
            fakes = map_tensors((args, kwargs), without_data)
            with mode:
                result = func(*fakes[0], **fakes[1])
            if any(_is_odd_sum(t) for t in tensors(result)):
                return "its result is a sum that DTensor cannot make"
    except Exception as error:  # whatever torch raises where it has no rule or trips over its own
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None


def _empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of ``shape`` that lies in memory as ``like`` does."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(_order(like)):
        if like.stride(dim) != 0:
            strides[dim] = step
            step *= max(shape[dim], 1)
    return torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)


def _is_odd_sum(tensor: Tensor) -> bool:
    """A sum still to be made that DTensor can make only in the case it was invented for."""
    if not isinstance(tensor, DTensor):
        return False
    return any(p.is_partial() and type(p) is not Partial for p in tensor.placements)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    log = logging.getLogger(FAKE_TENSOR_LOGGER)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def _same_randomness() -> Iterator[None]:
    """DTensor moves the state of a GPU's random numbers along, whether there is data or not."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield
