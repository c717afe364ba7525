"""Dropout of every kind: what is kept follows from the sample and the place, and is stored nowhere.

The backward computes the same mask again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.randomness.drawing import Drawing
from paceline.randomness.table import DrawnNumbers

_ALPHA = 1.7580993408473766  # of the SELU, as in torch's alpha_dropout
_IN_PLACE = frozenset(
    (
        *(torch.dropout_, torch.feature_dropout_, torch.alpha_dropout_),
        *(torch.feature_alpha_dropout_, torch.rrelu_),
    )
)
_BY_CHANNEL = frozenset(
    (F.feature_alpha_dropout, torch.feature_alpha_dropout, torch.feature_alpha_dropout_)
)
_WITHOUT_BATCH = {F.dropout1d: 2, F.dropout3d: 4}
"""Dimensions with which torch takes a tensor for one sample."""


def dropout(random: Drawing, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``F.dropout`` and ``torch.dropout``."""
    given, rate, training, inplace = _settings(func, args, kwargs)
    if not training or not 0 < rate < 1:
        return NotImplemented
    drawn = _numbers(random, func, given, given.shape)
    if drawn is None:
        return NotImplemented
    return dropped(given, drawn, rate, inplace=inplace)


def feature_dropout(random: Drawing, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``F.dropout1d`` to ``F.dropout3d``: whole channels."""
    given, rate, training, inplace = _settings(func, args, kwargs)
    if not training or not 0 < rate < 1:
        return NotImplemented
    drawn = _numbers(random, func, given, _channels(func, given))
    if drawn is None:
        return NotImplemented
    return dropped(given, drawn, rate, inplace=inplace)


def alpha_dropout(random: Drawing, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``F.alpha_dropout`` and, for whole channels, ``F.feature_alpha_dropout``."""
    given, rate, training, inplace = _settings(func, args, kwargs, rate=0.5)
    if not training or not 0 < rate < 1:
        return NotImplemented
    by_channel = func in _BY_CHANNEL
    drawn = _numbers(random, func, given, _channels(func, given) if by_channel else given.shape)
    if drawn is None:
        return NotImplemented
    keep = drawn.of(lambda numbers: numbers.keep(rate)).to(given.dtype)
    scale = 1 / math.sqrt((_ALPHA**2 * rate + 1) * (1 - rate))
    shift = (keep - 1) * (_ALPHA * scale) + _ALPHA * scale * rate
    if inplace:
        return given.mul_(keep * scale).add_(shift)
    return given * (keep * scale) + shift


def rrelu(random: Drawing, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A leaky ReLU whose slope is drawn for each element."""
    names = ("input", "lower", "upper", "training", "inplace")
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    given, lower, upper = named["input"], named.get("lower", 1 / 8), named.get("upper", 1 / 3)
    if not named.get("training", False):
        return NotImplemented
    drawn = _numbers(random, func, given, given.shape)
    if drawn is None:
        return NotImplemented
    slope = drawn.of(lambda n: n.uniform(given.dtype)) * (upper - lower) + lower
    factor = torch.where(given.detach() < 0, slope, torch.ones_like(slope))
    inplace = named.get("inplace", False) is True or func in _IN_PLACE
    return given.mul_(factor) if inplace else given * factor


def dropped(given: Tensor, drawn: DrawnNumbers, rate: float, *, inplace: bool = False) -> Tensor:
    """``given`` with what is not kept set to zero, and the rest scaled up."""
    scale = 1 / (1 - rate)
    if inplace or torch.compiler.is_compiling() or not given.requires_grad:
        keep = drawn.of(lambda numbers: numbers.keep(rate))
        if inplace:
            return given.mul_(keep.to(given.dtype) * scale)
        return given * keep * scale
    return _Dropped.apply(given, drawn, rate, scale)


class _Dropped(torch.autograd.Function):
    """Multiplies by a mask that is computed, not kept: the gradient's, once more."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, drawn: DrawnNumbers, rate: float, scale: float) -> Tensor:
        ctx.about = drawn, rate, scale
        if not drawn.dim and drawn.shape == given.shape and type(given) is Tensor:
            at_once = drawn.numbers.dropped(given, rate, scale)
            if at_once is not None:
                return at_once
        return (given * drawn.of(lambda numbers: numbers.keep(rate))).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None, None, None]:
        drawn, rate, scale = ctx.about
        return _Dropped.apply(grads[0], drawn, rate, scale), None, None, None


def _settings(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], rate: float = 0.5
) -> tuple[Tensor, float, bool, bool]:
    """Input, rate, training and inplace of any of the functions."""
    named = {**dict(zip(("input", "p", "training", "inplace"), args, strict=False)), **kwargs}
    training = named.get("training", named.get("train", func is not F.alpha_dropout))
    inplace = bool(named.get("inplace", False)) or func in _IN_PLACE
    return named["input"], float(named.get("p", rate)), bool(training), inplace


def _channels(func: Any, given: Tensor) -> tuple[int, ...]:
    """The shape of a mask with one element for each channel."""
    kept = 1 if given.ndim == _WITHOUT_BATCH.get(func) else 2
    return (*given.shape[:kept], *(1 for _ in given.shape[kept:]))


def is_shared(tensor: Tensor) -> bool:
    """Whether a tensor is the same for all samples: a parameter."""
    return isinstance(tensor, nn.Parameter)


def _numbers(
    random: Drawing, func: Any, given: Tensor, shape: Sequence[int]
) -> DrawnNumbers | None:
    shared = is_shared(given)
    part = random.part
    if part is None or tuple(shape) == tuple(given.shape):
        return random.numbers(func, shape, computed=True, shared=shared)
    whole = [whole if size > 1 or old == size else 1
             for whole, size, old in zip(part.shape, shape, given.shape, strict=True)]  # fmt: skip
    with random.on_part(part.resized(whole)):
        return random.numbers(func, shape, computed=True, shared=shared)
