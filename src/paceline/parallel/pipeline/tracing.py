"""Following values through the code between units.

Every value that depends on a unit or a parameter carries a mark with a name. The same code runs on
every stage, so counting calls gives a value the same name everywhere.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.nested import map_leaves, tensors
from paceline.parallel.pipeline.fake_tensors import is_fake, spec_of
from paceline.torch_internals import innermost_function_mode

Name = tuple[Any, ...]
"""``("call", k, i)``: tensor i of what the k-th call of a unit returned; ``("glue", k, j, i)``: of
the j-th function called before it; ``("arg", k, i)``: of what it was given; ``("param", name)``."""

_SHAPE_ONLY = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "__len__", "storage_offset"),
        *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_same_size"),
        *("is_inference", "element_size", "get_device", "type", "result_type", "can_cast"),
        *("requires_grad_", "retain_grad", "register_hook", "__hash__", "__repr__", "__format__"),
    )
)
"""What looks at a tensor but not at its values; fakes can answer."""
_CONSTANT = frozenset(
    (
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"),
        *("zeros_like", "ones_like", "full_like", "empty_like"),
    )
)
"""What makes a tensor from the looks of another: the result depends on no module."""
_TENSOR_PROPERTIES = frozenset(("T", "mT", "H", "mH", "real", "imag", "data", "grad"))


class StageEnd(BaseException):
    """Leaves a model's forward where the next stage begins; no ``except Exception`` stops it."""


class Mark(NamedTuple):
    """Says which value a tensor is in one run; ``absent`` where the tensor does not hold it."""

    name: Name
    run: object
    absent: bool


class ModelRun(TorchFunctionMode):
    """One pass through a model's code. Subclasses say what happens to units and marked values."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self._functions = 0
        self._paused = 0

    def use(self, value: Any, where: str) -> Any:
        """``value``, about to be computed with, as it shall be."""
        raise NotImplementedError

    def set_mark(self, tensor: Tensor, name: Name) -> None:
        """Name a value."""
        raise NotImplementedError

    def mark_of(self, tensor: Tensor) -> Mark | None:
        """The mark this run gave to ``tensor``."""
        mark: Mark | None = getattr(tensor, "_paceline_mark", None)
        return mark if mark is not None and mark.run is self else None

    def after_call(self, value: Any, given: list[Tensor]) -> None:
        """Name what the present call of a unit returned, and go on to the next."""
        known = {id(tensor) for tensor in given}
        for index, tensor in enumerate(tensors(value)):
            if id(tensor) not in known:
                self.set_mark(tensor, ("call", self.calls, index))
        self.calls += 1
        self._functions = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not look at what is called meanwhile: it happens inside a unit."""
        if innermost_function_mode() is self:
            self.__exit__(None, None, None)
            try:
                yield
            finally:
                self.__enter__()
            return
        self._paused += 1  # the model has put a mode of its own (torch.device) around the unit
        try:
            yield
        finally:
            self._paused -= 1

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        given = list(tensors((args, kwargs)))
        marked = any(self.mark_of(tensor) is not None for tensor in given)
        if not marked and not any(is_fake(tensor) for tensor in given):
            return func(*args, **kwargs)
        name = _name(func)
        if name in _SHAPE_ONLY:
            return func(*args, **kwargs)
        if name in _CONSTANT:
            return func(*map_leaves(args, _blank), **map_leaves(kwargs, _blank))
        args, kwargs = self.use((args, kwargs), name)
        result = func(*args, **kwargs)
        if marked:
            self._name_result(result if name != "__setitem__" else args[0])
        return result

    def _name_result(self, result: Any) -> None:
        named = list(tensors(result))
        for index, tensor in enumerate(named):
            self.set_mark(tensor, ("glue", self.calls, self._functions, index))
        self._functions += bool(named)


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
        return name if name in _TENSOR_PROPERTIES else "size"
    return "size" if name == "__set__" else name


def _blank(value: Any) -> Any:
    """A real tensor in place of a fake one, of which only shape, dtype and device are looked at."""
    if not is_fake(value):
        return value
    spec = spec_of(value)
    return torch.empty((), dtype=spec.dtype, device=spec.device).expand(spec.shape)


def describe(name: Name | None, units: Sequence[str]) -> str:
    """A value's name in words."""
    if name is None:
        return "a value whose origin torch does not show"
    if name[0] == "param":
        return f"the parameter {name[1]!r}"
    if name[0] == "call":
        return f"an output of {units[name[1]]!r}"
    if name[0] == "arg":
        return f"an input of {units[name[1]]!r}"
    after = f"after {units[name[1] - 1]!r}" if name[1] else "before the first module"
    return f"a value computed {after}"


def where_in_model(frames: traceback.StackSummary | None = None) -> str:
    """The line of the model's code that is running, or that ``frames`` end in."""
    for frame in reversed(frames or traceback.extract_stack()):
        path = frame.filename.replace("\\", "/")
        if "/torch/" not in path and "/paceline/parallel/pipeline/" not in path:
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "unknown place"
