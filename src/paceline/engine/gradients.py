"""The gradients of a step, as this rank holds them: plain, sharded, or of sparse embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from paceline.parallel.dtensor import local
from paceline.torch_internals import multiply_all
from paceline.world import World


class Gradients:
    """The gradients of ``parameters``; those without one are left out.

    ``counts`` tells which of them enter the norm on this rank, where several ranks hold the same
    one; the norm is then that of all ranks' together. ``device`` is where the ranks meet, those
    without a gradient of their own too.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        counts: Callable[[nn.Parameter], bool] | None,
        device: torch.device,
    ) -> None:
        self._parameters = [p for p in parameters if p.grad is not None]
        self._counts, self._device = counts, device
        for parameter in self._parameters:
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        self._tensors = [_values(p.grad) for p in self._parameters]

    def scale(self, factor: Tensor) -> None:
        """Multiply every gradient."""
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in self._tensors:
            alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for (device, dtype), tensors in alike.items():
            # One by one, and by a factor of another dtype, this takes a GPU twice as long as it
            # takes to read and write them.
            own = factor.to(device, torch.promote_types(dtype, torch.float32))
            multiply_all(tensors, own)

    def norm(self) -> Tensor:
        """The norm of all of them together."""
        if self._counts is None:
            return get_total_norm(self._tensors)
        own = [
            tensor
            for parameter, tensor in zip(self._parameters, self._tensors, strict=True)
            if self._counts(parameter)
        ]
        square = get_total_norm(own).to(self._device, torch.float64).square().reshape(1)
        with World.current().pulse.during("waiting"):
            dist.all_reduce(square)
        return square.sqrt().squeeze(0)

    def clip_norm(self, bound: float, norm: Tensor) -> None:
        """Scale down to the norm ``bound`` where ``norm``, the present one, is larger."""
        if self._counts is None:
            clip_grads_with_norm_(self._parameters, bound, norm)
            return
        # torch's function refuses plain tensors and DTensors side by side; the rest is the same.
        self.scale((bound / (norm + 1e-6)).clamp(max=1.0))

    def clip_values(self, bound: float) -> None:
        """Bound each element."""
        for parameter in self._parameters:
            if parameter.grad.is_sparse:  # scaling by the norm may have undone the coalescing
                parameter.grad = parameter.grad.coalesce()
            _values(parameter.grad).clamp_(-bound, bound)


def _values(gradient: Tensor) -> Tensor:
    """What can be measured and scaled; shares the gradient's memory."""
    return gradient.values() if gradient.is_sparse else local(gradient)
