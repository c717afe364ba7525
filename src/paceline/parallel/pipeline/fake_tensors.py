"""Tensors without data, and modules whose parameters are such: what absent modules are shown as.

Meta tensors would not do: a model reads ``x.device`` to place its masks and positions, which must
be real. torch's fake tensors name the device they stand for.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.torch_internals import FakeTensor, FakeTensorMode, TorchDispatchMode


class Spec(NamedTuple):
    """A tensor but for its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @property
    def bytes(self) -> int:
        """How much memory its values take."""
        return int(torch.Size(self.shape).numel() * self.dtype.itemsize)


def spec_of(tensor: Tensor) -> Spec:
    """What ``tensor`` is, but for its values."""
    return Spec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, str(tensor.device))


def is_fake(value: object) -> bool:
    """Whether ``value`` is a tensor without data."""
    return isinstance(value, FakeTensor)


class Birth(TorchDispatchMode):
    """Notes in which call of a unit a fake tensor comes into being."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self._call = call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if is_fake(value) and born_in(value) is None:
                value._paceline_born = self._call
        return result


def born_in(tensor: Tensor) -> int | None:
    """The call of a unit in which a fake tensor came into being, if it was one."""
    return getattr(tensor, "_paceline_born", None)


class Fakes:
    """Makes fake tensors that can be mixed with each other and with real ones."""

    def __init__(self, home: torch.device) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._home = home

    def tensor(self, spec: Spec) -> Tensor:
        """A fake tensor."""
        data = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
        device = torch.device(spec.device)
        # A model without values has no device yet: it will be where its inputs are.
        return FakeTensor(self.mode, data, self._home if device.type == "meta" else device)

    def parameter(self, parameter: Tensor) -> nn.Parameter:
        """A fake parameter like ``parameter``."""
        return nn.Parameter(self.tensor(spec_of(parameter)), parameter.requires_grad)

    def twin(self, module: nn.Module) -> nn.Module:
        """A copy of ``module`` with fake parameters and buffers: it computes shapes alone."""
        memo: dict[int, object] = {}
        for parameter in module.parameters():
            memo[id(parameter)] = self.parameter(parameter)
        for buffer in module.buffers():
            memo[id(buffer)] = self.tensor(spec_of(buffer))
        twin: nn.Module = copy.deepcopy(module, memo)
        return twin
