"""Averaging gradients over the copies of a model, for layouts that DDP does not know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.exchanging import Averaging
from paceline.parallel.whole import local

_BUCKET_MIB = 25.0


@torch.no_grad()
def average_gradients(
    parameters: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    averaging: Averaging | None = None,
    bucket_mib: float | None = None,
) -> None:
    """Average the gradients of ``parameters`` over ``group``, after the last backward of a step.

    A parameter that some ranks did not use counts as zero there; one that nobody used keeps no
    gradient, so that the optimizer leaves it alone as it would on one device.
    """
    used = list(_used_anywhere(parameters, group))
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if averaging is not None:
        exchange(used, averaging, bucket_mib)
        return
    gradients = [local(p.grad) for p in used if p.grad is not None]
    size = dist.get_world_size(group)
    pending = []
    for bucket in _buckets(gradients, bucket_mib):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        pending.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in pending:
        work.wait()
        flat.div_(size)
        parts = flat.split([gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def exchange(
    parameters: Sequence[nn.Parameter], averaging: Averaging, bucket_mib: float | None = None
) -> None:
    """Average the gradients that ``parameters`` have by ``averaging``, in buckets."""
    pairs = [(p, local(p.grad)) for p in parameters if p.grad is not None]
    owners = {id(gradient): parameter for parameter, gradient in pairs}
    for slot, bucket in enumerate(_buckets([gradient for _, gradient in pairs], bucket_mib)):
        averaging.average([owners[id(gradient)] for gradient in bucket], bucket, slot)


def _used_anywhere(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup
) -> Iterator[nn.Parameter]:
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        return
    device = local(trained[0]).device
    used = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8, device=device)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
    for parameter, flag in zip(trained, used.tolist(), strict=True):
        if flag:
            yield parameter


def _buckets(tensors: Sequence[Tensor], mib: float | None) -> Iterator[list[Tensor]]:
    """Tensors of one dtype, in their order, up to a size that keeps the links busy."""
    enough = (mib or _BUCKET_MIB) * 2**20
    open_buckets: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        bucket = open_buckets.setdefault(tensor.dtype, [])
        bucket.append(tensor)
        if sum(t.numel() * t.element_size() for t in bucket) >= enough:
            yield open_buckets.pop(tensor.dtype)
    yield from open_buckets.values()
