"""Which calls on split tensors DTensor can carry out, decided before they run.

A call that DTensor has no rule for is computed whole, which takes other collectives than computing
it split. So the ranks decide together, when a call of its kind first comes up: each tries it on
tensors without data, and it is split if it worked on all of them. What then goes wrong in the call
itself, on one rank or on all, is raised as it is.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from paceline.nested import leaves, map_tensors, tensors
from paceline.parallel.tensor.shards import wrap_all
from paceline.torch_internals import FAKE_TENSOR_LOGGER, FakeTensorMode


class SplitForms:
    """What has been decided so far; ``whole`` says of functions that are computed whole why."""

    def __init__(self) -> None:
        self._decided: dict[Any, bool] = {}
        self.whole: dict[str, str] = {}

    def has(self, func: Any, args: Any, kwargs: dict[str, Any], mesh: DeviceMesh) -> bool:
        """Whether ``func`` can be computed on tensors split over ``mesh`` as they are.

        A collective of these ranks for a call of a kind that has not come up before.
        """
        if torch.compiler.is_compiling():
            return True  # what cannot is not compiled, and comes here again
        with torch.no_grad():
            key = (func, *map(_looks, leaves((args, kwargs))))
        if key not in self._decided:
            why = _try(func, args, kwargs)
            self._decided[key] = _all_agree(why is None, mesh)
            if not self._decided[key]:
                name = getattr(func, "__name__", str(func))
                self.whole.setdefault(name, why or "another rank cannot split it")
        return self._decided[key]


def _all_agree(works: bool, mesh: DeviceMesh) -> bool:
    verdict = torch.tensor(int(works), device=mesh.device_type)
    for dim in range(mesh.ndim):
        dist.all_reduce(verdict, dist.ReduceOp.MIN, group=mesh.get_group(dim))
    return bool(verdict.item())


def _looks(value: Any) -> Any:
    """What a decision goes by: of tensors, all but the values."""
    if isinstance(value, DTensor):
        local = value.to_local()
        return (value.shape, value.dtype, value.placements, value.device_mesh.ndim, _order(local))
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
        with mode:
            fake = torch.empty_strided(
                local.shape, local.stride(), dtype=local.dtype, device=local.device
            )
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
