"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from paceline.compat.horovod.torch.mpi_ops import Sum, allgather, allreduce, size


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """Batch normalization whose mean and variance are those of all ranks' batches together.

    Takes input of two dimensions or more on CPUs and GPUs. Batches may differ in size between
    ranks, and a rank's may be empty.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The normalized input; in evaluation by the running statistics, without communication."""
        self._check_input_dim(input)
        uses_batch = self.training or self.running_mean is None
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        tracks = self.training and self.track_running_stats
        if not uses_batch or size() == 1:
            keep = not self.training or self.track_running_stats
            return functional.batch_norm(
                input,
                self.running_mean if keep else None,
                self.running_var if keep else None,
                self.weight,
                self.bias,
                uses_batch,
                momentum,
                self.eps,
            )
        output, mean, variance, count = _NormalizeOverRanks.apply(
            input, self.weight, self.bias, self.eps
        )
        if tracks:
            self._track(mean, variance, count, momentum)
        return output

    @torch.no_grad()
    def _track(
        self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor, momentum: float
    ) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _NormalizeOverRanks(torch.autograd.Function):
    """Normalizes by statistics of all ranks; one collective forward, one backward."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = input.to(_wide(input.dtype))
        mean, variance, count = _statistics(wide)
        scale = torch.rsqrt(variance + eps)
        normalized = (wide - _spread(mean, input)) * _spread(scale, input)
        ctx.save_for_backward(normalized, weight, scale, count)
        ctx.has_bias = bias is not None
        output = normalized
        if weight is not None:
            output = output * _spread(weight.to(output.dtype), input)
        if bias is not None:
            output = output + _spread(bias.to(output.dtype), input)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        normalized, weight, scale, count = ctx.saved_tensors
        wide = gradient.to(normalized.dtype)
        others = [axis for axis in range(wide.dim()) if axis != 1]
        of_bias = wide.sum(others)
        of_weight = (wide * normalized).sum(others)
        of_input = None
        if ctx.needs_input_grad[0]:
            sums = allreduce(
                torch.stack([of_bias, of_weight]), op=Sum, name="sync_batch_norm.backward"
            )
            mean, along = (sums / count).unbind()
            of_input = wide - _spread(mean, wide) - normalized * _spread(along, wide)
            factor = scale if weight is None else scale * weight.to(scale.dtype)
            of_input = (of_input * _spread(factor, wide)).to(gradient.dtype)
        # Gradients of weight and bias are this rank's own: the optimizer reduces them.
        return (
            of_input,
            of_weight.to(weight.dtype) if weight is not None else None,
            of_bias.to(gradient.dtype if weight is None else weight.dtype)
            if ctx.has_bias
            else None,
            None,
        )


def _statistics(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and biased variance of each channel over all ranks, and how many values it has."""
    channels = input.size(1)
    others = [axis for axis in range(input.dim()) if axis != 1]
    count = input.new_full((1,), input.numel() // channels if channels else 0)
    mean = input.mean(others) if input.numel() else input.new_zeros(channels)
    squares = (input - _spread(mean, input)).square().sum(others)
    own = torch.cat([count, mean, squares]).unsqueeze(0)
    every = allgather(own, name="sync_batch_norm.forward")
    counts, means, sums = every.split([1, channels, channels], dim=1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    # Each rank's squares are around its own mean: what lies between the means is added.
    squares = (sums + counts * (means - mean).square()).sum(0)
    return mean, squares / total, total


def _spread(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
