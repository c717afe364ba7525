"""Key and value heads that are fewer than the ranks: each is held by several of them.

The ``tp`` ranks are seen as a grid of heads and copies: rank ``head * copies + copy`` holds that
head. Parameters and activations are DTensors on the grid, split along its first dimension and
whole along its second, so that gradients are summed over the ranks that hold the same head, and
over no others. Each rank's queries need exactly the head that it holds.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional as F

from paceline.parallel.tensor.linear import shared_input
from paceline.parallel.tensor.shards import COPIES, cut_part, wrap
from paceline.torch_internals import unflattened_mesh
from paceline.world.sealing import sealed


def heads_mesh(mesh: DeviceMesh, heads: int) -> DeviceMesh:
    """The ranks of ``mesh`` as a grid of heads and copies. A collective of the whole world."""
    with sealed("gloo" if mesh.device_type == "cpu" else None):
        return unflattened_mesh(mesh, (heads, mesh.size() // heads), ("tp", COPIES))


def share_parameter(parameter: Tensor, grid: DeviceMesh, dim: int) -> nn.Parameter:
    """``parameter``, which all ranks hold alike, as one of which each rank holds one head."""
    local = cut_part(parameter.detach(), grid.size(0), grid.get_local_rank(0), dim)
    split = wrap(local, grid, Shard(dim), parameter.shape)
    return nn.Parameter(split, requires_grad=parameter.requires_grad)


def shared_linear(
    x: Tensor, weight: DTensor, bias: DTensor | None, mesh: DeviceMesh, *, in_first: bool
) -> DTensor:
    """The heads of keys or values that ``weight`` makes of ``x``; a DTensor on their grid."""
    grid = weight.device_mesh
    whole = shared_input(x, mesh).to_local(grad_placements=[Partial()])
    # The gradient of the output is complete on every copy, and x's is summed over all ranks.
    whole = _CountedOnce.apply(whole, grid.get_local_rank(1) == 0)
    matrix = weight.to_local()
    y = F.linear(
        whole, matrix.t() if in_first else matrix, None if bias is None else bias.to_local()
    )
    features = weight.shape[1 if in_first else 0]
    return wrap(y, grid, Shard(y.ndim - 1), torch.Size((*y.shape[:-1], features)))


class _CountedOnce(torch.autograd.Function):
    """Its input; the gradient passes on the first of several copies alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: bool) -> Tensor:
        ctx.counts = counts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        return grads[0] if ctx.counts else torch.zeros_like(grads[0]), None


def own_head(tensor: DTensor) -> Tensor:
    """The head that this rank holds, for its own queries alone."""
    return _SummedOverCopies.apply(tensor.to_local(), tensor.device_mesh)


class _SummedOverCopies(torch.autograd.Function):
    """Its input; the gradient is the sum of the copies', each of which served other queries."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, grid: DeviceMesh) -> Tensor:
        ctx.group = grid.get_group(1)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
