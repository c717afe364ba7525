"""Tensors without data: fake parameters, fake modules, and what a unit returns without its values.

They stand for the modules that are on other stages. Meta tensors would not do: a model reads
``x.device`` to place its masks and positions, which must be real. torch's fake tensors name the
device they stand for.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.nested import leaves, map_leaves
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


_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def template_of(result: Any, given: Any) -> Any:
    """``result`` of a unit that was ``given`` this, with marks in place of its tensors."""
    known = {id(leaf): index for index, leaf in enumerate(leaves(given))}

    def slot_of(leaf: Any) -> Any:
        if isinstance(leaf, _PLAIN):
            return leaf
        if id(leaf) in known:
            return _OutputSlot(None, known[id(leaf)])
        return _OutputSlot(spec_of(leaf), None) if isinstance(leaf, Tensor) else leaf

    return map_leaves(result, slot_of)


class _OutputSlot:
    """A place in what a unit returns: a new tensor, or something it was given."""

    def __init__(self, spec: Spec | None, given: int | None) -> None:
        self.spec, self.given = spec, given


def fill(template: Any, given: Any, fakes: Fakes) -> Any:
    """What a unit returns, with fakes for tensors; ``template`` comes from ``template_of``."""
    known = list(leaves(given))

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, _OutputSlot):
            return leaf
        if leaf.given is not None:
            return known[leaf.given]
        assert leaf.spec is not None
        return fakes.tensor(leaf.spec)

    return map_leaves(template, make)


def zeros_like(leaf: Any) -> Any:
    """Zeros in place of a fake tensor; anything else as it is."""
    if not is_fake(leaf):
        return leaf
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
