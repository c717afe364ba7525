"""An optimizer whose state lives in the memory of the CPU, while parameters stay on their device.

A step copies gradients and parameters down, lets the optimizer work on the copies, and copies the
parameters up again. The state never leaves the CPU: for Adam in float32 that frees twice the bytes
of the parameters on the device, for the time of the copies and of an update on the CPU. Pass
``fused=True`` to torch's Adam, AdamW, SGD or Adagrad: their fused update is the fast one there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import TrainingError
from paceline.parallel.dtensor import local

_CPU = torch.device("cpu")


def offload_state(optimizer: Optimizer) -> OffloadedState | None:
    """Keep the state of ``optimizer`` on the CPU from now on; nothing to do where all of it is.

    It stays the object it is: schedules, ``param_groups``, ``zero_grad``, ``state_dict`` and
    ``load_state_dict`` go on as before, the state dict in its ordinary form.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if all(local(parameter).device == _CPU for parameter in parameters):
        return None
    return OffloadedState(optimizer)


class OffloadedState:
    """What ``offload_state`` hangs on an optimizer; ``remove`` takes it off again."""

    def __init__(self, optimizer: Optimizer) -> None:
        _check(optimizer)
        self.optimizer = optimizer
        # The copies that the optimizer works on; a gradient's memory is kept for the next one.
        self._copies: dict[Tensor, Tensor] = {}
        self._gradients: dict[Tensor, Tensor] = {}
        self._originals: list[list[Tensor]] | None = None
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        for parameter in list(optimizer.state):
            _move_state(optimizer.state[parameter])

    def remove(self) -> None:
        """Let the optimizer work where its parameters are; its state follows at the next load."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(value is not None for value in (*args[1:], kwargs.get("closure"))):
            raise TrainingError(
                f"offload='optimizer': {type(optimizer).__name__}.step(closure) cannot run the "
                "model while its optimizer works on copies. Use an optimizer without a closure."
            )
        self._put_copies()
        assert self._originals is not None
        for group, originals in zip(optimizer.param_groups, self._originals, strict=True):
            for copy, original in zip(group["params"], originals, strict=True):
                local(copy).copy_(local(original), non_blocking=True)
                copy.grad = self._gradient_of(original)
        _wait_for(self._copies)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert self._originals is not None
        for group, originals in zip(optimizer.param_groups, self._originals, strict=True):
            for copy, original in zip(group["params"], originals, strict=True):
                # In the order of the device's work: done before the next step reads it, or before
                # this module writes to the copy again.
                if original.grad is not None:
                    original.copy_(copy, non_blocking=True)
                copy.grad = None
        self._put_originals()

    def _before_load(self, optimizer: Optimizer, state_dict: Any) -> None:
        self._put_copies()  # torch moves a state to where the parameters are

    def _after_load(self, optimizer: Optimizer) -> None:
        self._put_originals()

    def _put_copies(self) -> None:
        self._put_originals()  # where the last step failed half way
        self._originals = []
        for group in self.optimizer.param_groups:
            self._originals.append(group["params"])
            group["params"] = [self._copy_of(p) for p in group["params"]]
        self._rename_state({p: self._copies[p] for held in self._originals for p in held})

    def _put_originals(self) -> None:
        if self._originals is None:
            return
        held = [p for originals in self._originals for p in originals]
        self._rename_state({self._copies[p]: p for p in held})
        for group, originals in zip(self.optimizer.param_groups, self._originals, strict=True):
            group["params"] = originals
        self._originals = None

    def _rename_state(self, names: dict[Tensor, Tensor]) -> None:
        state = self.optimizer.state
        for old, new in names.items():
            if old in state:
                state[new] = _move_state(state.pop(old))

    def _copy_of(self, parameter: Tensor) -> Tensor:
        if parameter not in self._copies:
            self._copies[parameter] = _empty_on_cpu(parameter)
        return self._copies[parameter]

    def _gradient_of(self, parameter: Tensor) -> Tensor | None:
        gradient = parameter.grad
        if gradient is None:
            return None
        if gradient.is_sparse:
            return gradient.to(_CPU)
        if parameter not in self._gradients or self._gradients[parameter].dtype != gradient.dtype:
            self._gradients[parameter] = _empty_on_cpu(gradient)
        copy = self._gradients[parameter]
        local(copy).copy_(local(gradient), non_blocking=True)
        return copy


def _check(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TrainingError(
            f"offload='optimizer': {name} runs the model while it works, which it cannot do on "
            "copies. Use another optimizer, or leave offload out."
        )
    for group in optimizer.param_groups:
        if group.get("capturable"):
            raise TrainingError(
                f"offload='optimizer': {name}(capturable=True) needs its parameters on a GPU. "
                "Leave capturable out."
            )


def _empty_on_cpu(like: Tensor) -> Tensor:
    """A tensor on the CPU, spread as ``like`` is, pinned where that makes copies faster."""
    made = torch.empty_like(like.detach(), device=_CPU)
    if local(like).device.type == "cuda":
        own = local(made)
        own.set_(torch.empty_like(own, pin_memory=True))  # type: ignore[call-overload]
    return made


def _move_state(state: Any) -> Any:
    """The state of one parameter with its tensors on the CPU."""
    for key, value in state.items():
        if isinstance(value, Tensor) and local(value).device != _CPU:
            moved = _empty_on_cpu(value)
            local(moved).copy_(local(value))
            state[key] = moved
    return state


def _wait_for(parameters: dict[Tensor, Tensor]) -> None:
    """Until what was copied from the devices of ``parameters`` has arrived."""
    for device in {local(parameter).device for parameter in parameters}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
