"""Comparing what a layout computed with what one process computed, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.parallel.dtensor import local, part_of

KINDS = ("loss", "gradient", "norm", "parameter", "buffer")
"""What is compared, in the order in which a step computes it."""

_SMALL = 1e-3
"""Below this share of the largest value of its kind, a tensor is measured against that value.

Some gradients are zero but for rounding (the bias before a norm, the key bias of an attention):
relative to themselves, any two runs differ by everything.
"""

Values = dict[str, dict[str, Tensor]]
"""By kind, by name: everything one step computed. Loss and norm have the name ``""``."""


Held = Mapping[str, Sequence[nn.Parameter]]
"""By name in the whole model: the parameters, or parts of them, that a rank holds."""


class ValueKey(NamedTuple):
    """One compared value."""

    step: int
    kind: str
    name: str


class Measure(NamedTuple):
    """How far a value is from the reference.

    ``difference`` is relative. ``factor`` times the reference is the nearest to it, and
    ``off_factor`` how far that still is. ``stale``: it is what the reference had a step before.
    """

    difference: float
    factor: float
    off_factor: float
    zero: bool
    stale: bool


_ROUNDING = {"fp64": 1e3 * torch.finfo(torch.float64).eps, "fp32": 30 * torch.finfo().eps}
"""Gradients up to this share of the largest are rounding, and tell nothing about their element."""


class RunComparison:
    """One run beside the reference, step after step.

    An element whose gradient is zero but for rounding (again the bias before a norm) has no
    determined update under an optimizer that divides by the gradient's size, as Adagrad does. From
    then on that element is left out where parameters are compared, and ``settle`` gives it the
    reference's value, lest it shift a running mean behind it; ``unsettled`` counts such elements.
    """

    def __init__(self, precision: str) -> None:
        self._rounding = _ROUNDING.get(precision)
        self._masks: dict[str, Tensor] = {}

    @property
    def unsettled(self) -> dict[str, int]:
        """By parameter: how many of its elements have had a gradient of nothing but rounding."""
        counts = {name: int(mask.sum()) for name, mask in self._masks.items()}
        return {name: count for name, count in counts.items() if count}

    def measure(
        self, values: Values, reference: Values, before: Values | None
    ) -> dict[tuple[str, str], Measure]:
        """Each value against the reference; ``before`` is the reference one step earlier."""
        self._note_rounding(values["gradient"], reference["gradient"])
        # A tied parameter has its gradient under one of its names.
        named = {values["parameter"][name].data_ptr(): name for name in self._masks}
        found = {}
        for kind, tensors in values.items():
            floor = _SMALL * _largest(reference[kind])
            for name, value in tensors.items():
                if name not in reference[kind]:
                    continue
                right = reference[kind][name]
                earlier = None if before is None else before.get(kind, {}).get(name)
                if kind == "parameter" and value.shape == right.shape:
                    mask = self._masks.get(named.get(value.data_ptr(), name))
                    if mask is not None and bool(mask.any()):
                        value = torch.where(mask, right, value)
                found[kind, name] = _one(value, right, earlier, floor)
        return found

    @torch.no_grad()
    def settle(self, held: Held, reference: Values) -> None:
        """Take over the reference's value for elements that only rounding has moved.

        ``held`` are the parameters of this rank, which may be parts of the whole ones.
        """
        for name, parameters in held.items():
            mask = self._masks.get(name)
            if mask is None or not bool(mask.any()):
                continue
            for parameter in parameters:
                own = local(parameter)
                right = part_of(reference["parameter"][name], parameter).to(own.device)
                chosen = part_of(mask, parameter).to(own.device)
                if chosen.shape == own.shape:
                    own.copy_(torch.where(chosen, right, own))

    def _note_rounding(self, own: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
        if self._rounding is None:
            return
        bound = self._rounding * _largest(right)
        for name, gradient in own.items():
            if name not in right or gradient.shape != right[name].shape:
                continue
            larger = torch.maximum(gradient.abs(), right[name].abs())
            mask = (larger <= bound) & (larger > 0)
            self._masks[name] = self._masks[name] | mask if name in self._masks else mask


def far_apart(values: Values, reference: Values, bound: float) -> dict[tuple[str, str], Measure]:
    """What differs by more than ``bound`` between two states, by kind and name."""
    found = {}
    for kind in ("parameter", "buffer"):
        floor = _SMALL * _largest(reference[kind])
        for name, right in reference[kind].items():
            if name in values[kind]:
                one = _one(values[kind][name], right, None, floor)
                if one.difference > bound:
                    found[kind, name] = one
    return found


def _one(value: Tensor, reference: Tensor, before: Tensor | None, floor: float) -> Measure:
    if value.shape != reference.shape:
        return Measure(math.inf, math.nan, math.inf, False, False)
    a, b = value.detach().double().flatten(), reference.double().flatten()
    scale = max(_size(b), floor)
    square = float(b @ b)
    factor = float(a @ b) / square if square > 0 else math.nan
    stale = before is not None and before.shape == value.shape and is_stale(a, b, before)
    return Measure(
        difference=_relative(_distance(a, b), scale),
        factor=factor,
        off_factor=_relative(_distance(a, factor * b), scale) if square > 0 else math.inf,
        zero=_size(a) == 0 < _size(b),
        stale=stale,
    )


def is_stale(value: Tensor, right: Tensor, before: Tensor) -> bool:
    """Whether ``value`` is still ``before``, where it should have become ``right``."""
    own, new, old = (tensor.detach().double().flatten() for tensor in (value, right, before))
    moved = _distance(new, old)
    # Where the reference itself stood still, nothing can be said.
    return moved > 0 and _distance(own, old) <= 1e-3 * moved


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of two elements; equal infinities, and two NaN, do not differ."""
    if a.numel() == 0:
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    gap = (a - b).abs().masked_fill(same, 0.0)
    return float(gap.nan_to_num(nan=math.inf).max())


def _relative(distance: float, scale: float) -> float:
    if distance == 0:
        return 0.0
    return distance / scale if scale > 0 else math.inf


def _size(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _largest(tensors: Mapping[str, Tensor]) -> float:
    return max((_size(tensor.double().flatten()) for tensor in tensors.values()), default=0.0)


MOST_ROUNDING = 1e-6
"""In float64 nothing beyond this is taken for rounding."""
MOST_ROUNDING_IN_FLOAT32 = 1e-3
"""The same, for a model that does not run in float64."""


class Tolerance:
    """Which differences are rounding.

    In the run's own precision: ten times the most that any tensor of its kind shows at that step
    on one process when the samples come in another order and cut. In float64: that, or a hundred
    times what the same tensor shows at any step, but at least 1e-9 and at most 1e-6.
    """

    FLOORS = {"fp64": 1e-9, "fp32": 1e-6, "bf16": 1e-3, "fp16": 1e-3}  # noqa: RUF012

    def __init__(self, precision: str, noise: Mapping[ValueKey, float]) -> None:
        self.floor = self.FLOORS[precision]
        self._exact = precision == "fp64"
        self._of_kind: dict[tuple[int, str], float] = {}
        self._of_tensor: dict[tuple[str, str], float] = {}
        for place, value in noise.items():
            kind, tensor = (place.step, place.kind), (place.kind, place.name)
            self._of_kind[kind] = max(value, self._of_kind.get(kind, 0.0))
            self._of_tensor[tensor] = max(value, self._of_tensor.get(tensor, 0.0))

    def allowed(self, place: ValueKey) -> float:
        """The largest difference that is rounding, for one value."""
        noise = 10 * self._of_kind.get((place.step, place.kind), 0.0)
        if self._exact:
            # One tensor in two runs is a small sample: it may have been lucky.
            noise = max(noise, 100 * self._of_tensor.get((place.kind, place.name), 0.0))
            noise = min(noise, MOST_ROUNDING)
        return max(self.floor, noise)

    @property
    def noise(self) -> float:
        """The largest difference that one process shows against itself."""
        return max(self._of_kind.values(), default=0.0)


def sketch(tensors: Mapping[str, Tensor], most: int = 20_000) -> Tensor:
    """A sample of the elements of ``tensors``, the same for tensors of the same shapes."""
    total = sum(tensor.numel() for tensor in tensors.values())
    stride = max(1, total // most)
    return torch.cat([tensors[name].detach().double().flatten()[::stride] for name in tensors])
