"""What goes from one stage to the next, made uniform.

torch's stages send a fixed list of tensors and expect a gradient for each. So everything that
crosses becomes a floating-point tensor that requires a gradient, whatever it was: integers travel
as the bits of a float, complex numbers as pairs, and values that get no gradient are given zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.parallel.pipeline.fake_tensors import Spec

_FLOAT_OF_SIZE = {8: torch.float64, 4: torch.float32, 2: torch.float16}


def wire_spec(spec: Spec) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype in which a value like ``spec`` is sent."""
    dtype = spec.dtype
    if dtype.is_complex:
        return (*spec.shape, 2), dtype.to_real()
    if dtype.is_floating_point:
        return spec.shape, dtype
    return spec.shape, _FLOAT_OF_SIZE.get(dtype.itemsize, torch.float16)


def pack(value: Tensor, device: torch.device) -> Tensor:
    """``value`` as it is sent."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    value = value.to(device)
    if value.is_complex():
        return torch.view_as_real(value.resolve_conj()).contiguous()
    if value.is_floating_point():
        return value.contiguous()
    if value.dtype.itemsize == 1:  # float16 holds every whole number of one byte
        return value.to(torch.float16).contiguous()
    return value.contiguous().view(_FLOAT_OF_SIZE[value.dtype.itemsize])


def unpack(value: Tensor, spec: Spec) -> Tensor:
    """The inverse of ``pack``."""
    if spec.dtype.is_complex:
        value = torch.view_as_complex(value)
    elif not spec.dtype.is_floating_point:
        value = value.detach()
        value = value.to(spec.dtype) if spec.dtype.itemsize == 1 else value.view(spec.dtype)
    return value.to(spec.device)


class _Enter(torch.autograd.Function):
    """Copies what was received, so that a stage may write into it; gives every input a gradient."""

    @staticmethod
    def forward(ctx: Any, *received: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.clone() for value in received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        # torch hands in zeros where an output was not used; only dense memory can be sent.
        return tuple(gradient.contiguous() for gradient in gradients)


class _Leave(torch.autograd.Function):
    """Ties a stage's outputs together: all require a gradient, one backward reaches them all."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *gradients)


def enter(received: Sequence[Tensor], specs: Sequence[Spec]) -> list[Tensor]:
    """What a stage computes with, from what it received."""
    if not received:
        return []
    copies = _Enter.apply(*received)
    return [unpack(value, spec) for value, spec in zip(copies, specs, strict=True)]


def leave(values: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """What a stage sends, from what it computed."""
    # Where nothing before it is trained, a value needs this to take part in the backward at all.
    start = torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())
    packed = [pack(value, device) for value in values]
    sent: tuple[Tensor, ...] = _Leave.apply(start, *packed)
    return sent
