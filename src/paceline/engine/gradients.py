"""The gradients of a step as plain tensors, those of sparse embeddings included."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer


class Gradients:
    """The gradients that ``optimizer`` is about to use; parameters without one are left out."""

    def __init__(self, optimizer: Optimizer) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self._parameters = [p for p in held if p.grad is not None]
        for parameter in self._parameters:
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        # A sparse gradient's values share its memory, and can be measured and scaled.
        self._tensors = [_values(p.grad) for p in self._parameters]

    def scale(self, factor: Tensor) -> None:
        """Multiply every gradient."""
        for tensor in self._tensors:
            tensor.mul_(factor)

    def norm(self) -> Tensor:
        """The norm of all of them together."""
        return get_total_norm(self._tensors)

    def clip_norm(self, bound: float, norm: Tensor) -> None:
        """Scale down to the norm ``bound`` where ``norm``, the present one, is larger."""
        clip_grads_with_norm_(self._parameters, bound, norm)

    def clip_values(self, bound: float) -> None:
        """Bound each element."""
        clip_grad_value_(_dense(self._parameters), bound)
        for parameter in self._parameters:
            if parameter.grad.is_sparse:  # scaling by the norm may have undone the coalescing
                parameter.grad = parameter.grad.coalesce()
                parameter.grad.values().clamp_(-bound, bound)


def _values(gradient: Tensor) -> Tensor:
    return gradient.values() if gradient.is_sparse else gradient


def _dense(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p for p in parameters if p.grad is not None and not p.grad.is_sparse]
