"""Batch normalisation over the samples of all ranks, on any device.

torch's own ``SyncBatchNorm`` refuses CPU modules and would count the placeholder of a rank whose
share is empty; this one does neither. Its statistics are those of one process that sees every
rank's microbatch at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import TrainingError
from paceline.world import Group

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SyncBatchNorm(nn.Module):
    """Takes the place, the parameters and the buffers of a ``BatchNorm{1,2,3}d``."""

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        norm = cast(nn.BatchNorm2d, source)
        self.eps = norm.eps
        self.momentum = norm.momentum
        # The same Parameter objects: an optimizer that holds them keeps working.
        self.weight = norm.weight
        self.bias = norm.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        self.training = norm.training
        self.group: dist.ProcessGroup | None = None  # whose samples are taken together; see join
        # Switched off while a rank runs a placeholder instead of samples of its own.
        self.contributes = True

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``(batch, channels, ...)`` over all dimensions but the channels'."""
        use_batch = self.training or self.running_mean is None
        if not use_batch or self.group is None or not self.training:
            return self._local(x, use_batch)
        weight = self.weight if self.weight is not None else x.new_ones(x.shape[1])
        bias = self.bias if self.bias is not None else x.new_zeros(x.shape[1])
        y, mean, var, count = _Normalise.apply(
            x, weight, bias, self.eps, self.contributes, self.group
        )
        self._track(mean, var, count)
        return y

    def _local(self, x: Tensor, use_batch: bool) -> Tensor:
        momentum = self._momentum() if self.training else 0.0
        return F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            use_batch,
            momentum,
            self.eps,
        )

    def _momentum(self) -> float:
        """The weight of this batch in the running statistics; counts the batch."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # a cumulative average
                return 1.0 / float(self.num_batches_tracked)
        return self.momentum if self.momentum is not None else 0.0

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        if not self.contributes and float(count) == 0:  # placeholders on every rank
            return
        momentum = self._momentum()
        unbiased = var * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _Normalise(torch.autograd.Function):
    """One collective each way: the ranks' counts, means and squared deviations; and two sums."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        contributes: bool,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x if x.dtype == torch.float64 else x.float()
        dims = [d for d in range(x.ndim) if d != 1]
        shape = [1, -1] + [1] * (x.ndim - 2)
        items = x.numel() // x.shape[1] if contributes else 0
        local_var, local_mean = torch.var_mean(wide, dims, correction=0)
        packed = torch.cat([local_mean, local_var, local_mean.new_tensor([items])])
        if not contributes:
            packed.zero_()
        gathered = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, packed, group=group)
        means, variances, counts = torch.stack(gathered).split([x.shape[1], x.shape[1], 1], dim=1)
        count = counts.sum()
        some = count.clamp(min=1)  # none, where every rank runs a placeholder
        mean = (means * counts).sum(0) / some
        # Combining deviations from each rank's own mean loses no digits to cancellation.
        var = ((variances + (means - mean) ** 2) * counts).sum(0) / some
        scale = torch.rsqrt(var + eps)
        normal = (wide - mean.view(shape)) * scale.view(shape)
        y = normal * weight.view(shape) + bias.view(shape)
        ctx.save_for_backward(normal, weight, scale, some)
        ctx.dims, ctx.shape, ctx.contributes = dims, shape, contributes
        ctx.group = group
        ctx.mark_non_differentiable(mean, var, count)
        return y.to(x.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        normal, weight, scale, count = ctx.saved_tensors
        grad = grads[0].to(normal.dtype)
        grad_bias = grad.sum(ctx.dims)
        grad_weight = (grad * normal).sum(ctx.dims)
        sums = torch.stack([grad_bias, grad_weight])
        dist.all_reduce(sums, group=ctx.group)
        mean_grad, mean_product = (sums / count).unbind(0)
        shape = ctx.shape
        grad_x = (grad - mean_grad.view(shape) - normal * mean_product.view(shape)) * (
            scale * weight
        ).view(shape)
        if not ctx.contributes:  # the statistics do not depend on a placeholder
            grad_x.zero_()
        return (
            grad_x.to(grads[0].dtype),
            grad_weight.to(weight.dtype),
            grad_bias.to(weight.dtype),
            None,
            None,
            None,
        )


def convert(model: nn.Module) -> nn.Module:
    """``model`` with every BatchNorm in it replaced; the model itself may be one."""
    if isinstance(model, _BATCH_NORMS):
        return _replacement(model)
    made: dict[nn.Module, SyncBatchNorm] = {}  # a norm that has several names stays one module
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, _BATCH_NORMS):
            if module not in made:
                made[module] = _replacement(module)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, made[module])
    return model


def _replacement(norm: nn.Module) -> SyncBatchNorm:
    if not any(type(norm).forward is kind.forward for kind in _BATCH_NORMS):
        raise TrainingError(
            f"sync_batchnorm: {type(norm).__name__} is a BatchNorm with a forward of its own, "
            "which a synchronised one would drop. Use nn.BatchNorm in the model, or leave "
            "sync_batchnorm out."
        )
    return SyncBatchNorm(norm)


def join(model: nn.Module, group: Group) -> bool:
    """Normalise over the samples of ``group``; false when ``model`` has no synchronised norm."""
    norms = _norms(model)
    for norm in norms:
        norm.group = group.process_group
    return bool(norms)


@contextlib.contextmanager
def not_counting(model: nn.Module) -> Iterator[None]:
    """For a microbatch that only keeps other ranks company: no statistics take it in.

    Synchronised norms go on following what the other ranks see.
    """
    norms = _norms(model)
    saved = [
        (buffer, buffer.clone())
        for module in model.modules()
        if not isinstance(module, SyncBatchNorm)
        for buffer in module.buffers(recurse=False)
        if not buffer.is_meta
    ]
    for norm in norms:
        norm.contributes = False
    try:
        yield
    finally:
        for norm in norms:
            norm.contributes = True
        for buffer, before in saved:
            # Past the version counter: earlier microbatches whose backward is still owed have
            # saved this buffer, and for them it is as it was.
            buffer.data.copy_(before)


def _norms(model: nn.Module) -> list[SyncBatchNorm]:
    return [module for module in model.modules() if isinstance(module, SyncBatchNorm)]
