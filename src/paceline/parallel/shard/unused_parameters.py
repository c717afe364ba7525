"""Parameters that a step does not use, on some ranks or on all.

FSDP sums over the ranks the gradients of those parameters that have one. Where that depends on the
rank, the ranks would exchange messages of different sizes. So a parameter without a gradient gets
one of zeros before its unit is summed. Afterwards those that no rank has used lose it again, since
an optimizer leaves alone a parameter without a gradient, but decays one whose gradient is zero.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from paceline.nested import tensors
from paceline.parallel.dtensor import local
from paceline.torch_internals import after_backward


class HeldParameter(NamedTuple):
    """Where a parameter lives: the module that owns it, and its name there."""

    owner: nn.Module
    name: str

    @property
    def parameter(self) -> Tensor:
        """What is there now: the piece this rank keeps, or while it is gathered, the whole."""
        return getattr(self.owner, self.name)


class ParameterUsage:
    """Watches which parameters of a sharded model get a gradient in a step."""

    def __init__(self, root: nn.Module, units: Mapping[nn.Module, Sequence[HeldParameter]]) -> None:
        self.slots = [slot for held in units.values() for slot in held]
        self.counts = True
        self._used = [False] * len(self.slots)
        # The gathered parameters, which FSDP makes once and keeps, and whose place is whose.
        self._watched: dict[Tensor, int] = {}
        self._held: dict[nn.Module, list[int]] = {}
        self._running: Counter[nn.Module] = Counter()
        self._queued = False
        start = 0
        # All of this is to run inside FSDP's own hooks, which must be put on afterwards: what is
        # queued here for the end of backward then comes before what FSDP queues.
        for unit, held in units.items():
            self._held[unit] = list(range(start, start + len(held)))
            start += len(held)
            unit.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        root.register_forward_hook(self._after_root)

    def begin(self, counts: bool) -> None:
        """A microbatch starts; what it uses is noted only if it ``counts``."""
        self.counts = counts
        self._running.clear()
        self._queued = False

    def forget(self) -> list[Tensor]:
        """Start afresh; gives the gathered parameters that backward may have left gradients in."""
        self.begin(True)
        self._used = [False] * len(self.slots)
        return list(self._watched)

    def take(self) -> list[bool]:
        """Which of ``slots`` got a gradient since the last call.

        A gradient that is not zero is one, should it have come by another way than backward.
        """
        used, self._used = self._used, [False] * len(self.slots)
        return [
            seen or (self.counts and _is_not_zero(slot.parameter.grad))
            for seen, slot in zip(used, self.slots, strict=True)
        ]

    def _before_forward(self, unit: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for index in self._held[unit]:
            parameter = self.slots[index].parameter
            if parameter.requires_grad and parameter not in self._watched:
                self._watched[parameter] = index
                parameter.register_post_accumulate_grad_hook(_weak(self._note))
        self._running[unit] += 1
        inputs = [
            tensor for tensor in tensors((args, kwargs), every_field=True) if tensor.requires_grad
        ]
        if inputs:  # once these have their gradients, FSDP sums those of the unit's parameters

            def fill(grads: Any) -> None:
                self._fill(unit)
                self._running[unit] -= 1

            register_multi_grad_hook(inputs, fill)

    def _after_root(self, root: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors(output, every_field=True) if torch.is_grad_enabled() else ():
            if tensor.requires_grad:
                tensor.register_hook(self._queue)

    def _queue(self, grad: Tensor) -> None:
        """Units without such inputs are summed at the end of backward: be there before."""
        if not self._queued:
            self._queued = True
            after_backward(self._fill_rest)

    def _fill_rest(self) -> None:
        self._queued = False
        for unit, times in self._running.items():
            if times > 0:
                self._fill(unit)

    def _fill(self, unit: nn.Module) -> None:
        for index in self._held[unit]:
            parameter = self.slots[index].parameter
            # Only a gathered parameter is watched; a piece of one is FSDP's to fill.
            if parameter in self._watched and parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _note(self, parameter: Tensor) -> None:
        if self.counts:
            self._used[self._watched[parameter]] = True


def _weak(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """``method`` for a hook that must not keep its object: no garbage collection sees it there."""
    held = weakref.WeakMethod(method)

    def call(tensor: Tensor) -> None:
        if (found := held()) is not None:
            found(tensor)

    return call


def _is_not_zero(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(local(gradient).any())
