"""In which number format a step computes: fp32, bf16 or fp16 by autocast, or fp64 throughout."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.engine.loss_scale import AgreedScaler
from paceline.errors import TrainingError
from paceline.formatting import one_of
from paceline.options import LossScaling
from paceline.options.habits import value_meant

PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CASTS = {
    Tensor.float: Tensor.double,
    Tensor.half: Tensor.double,
    Tensor.bfloat16: Tensor.double,
}
_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class Precision:
    """The number format of a run: casts the model once, wraps each forward, scales fp16 losses."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        sharded: bool = False,
        scaling: LossScaling = LossScaling(),
    ) -> None:
        if name not in PRECISIONS:
            meant = value_meant(name)
            hint = f" Did you mean {meant!r}?" if meant in PRECISIONS else ""
            raise TrainingError(f"precision={name!r} must be {one_of(PRECISIONS)}.{hint}")
        self.name = name
        self.device = device
        self.device_types = [device.type]  # more than one under a device map
        # The scaler keeps small fp16 gradients from vanishing; it has state, so it is saved.
        self.scaler = _scaler(device, sharded, scaling) if name == "fp16" else None

    @property
    def batch_dtype(self) -> torch.dtype | None:
        """What floating-point inputs are cast to; ``None`` leaves them as they are."""
        return torch.float64 if self.name == "fp64" else None

    def prepare(self, model: nn.Module) -> None:
        """Cast the model in place where the precision asks for it."""
        if self.name == "fp64":
            model.double()

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which a forward pass runs."""
        if self.name in _LOW:
            return self._autocast()
        if self.name == "fp64":
            return _StayDouble()
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        with contextlib.ExitStack() as contexts:
            for kind in self.device_types:
                contexts.enter_context(torch.autocast(kind, dtype=_LOW[self.name]))
            yield


def _scaler(
    device: torch.device, sharded: bool, scaling: LossScaling
) -> torch.amp.GradScaler | AgreedScaler:
    """A gradient scaler; where ranks hold parts of the gradient, one on which they all agree."""
    if sharded:
        return AgreedScaler(device, scaling)
    return torch.amp.GradScaler(device.type, **dataclasses.asdict(scaling))


class _StayDouble(TorchFunctionMode):
    """Turns casts to a narrower float into casts to float64.

    Many models compute a norm, a softmax or the loss "in full precision" by casting to float32,
    which for a float64 run throws half the digits away.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        widened = {k: _widen(v) for k, v in (kwargs or {}).items()}
        return _CASTS.get(func, func)(*(_widen(value) for value in args), **widened)


def _widen(value: Any) -> Any:
    # Identity, not equality: comparing a tensor with a dtype would itself be a torch call.
    return torch.float64 if any(value is dtype for dtype in _NARROW) else value
