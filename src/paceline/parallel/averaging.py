"""Averaging gradients over the data-parallel ranks, where neither DDP nor FSDP does it by itself.

``Averaging`` is what the engine hands in where gradients travel in another form (compressed,
in two levels); ``average_gradients`` is for layouts that DDP does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.dtensor import local

_BUCKET_MIB = 25.0


class UnitParameter(NamedTuple):
    """A parameter of a sharded unit: its name in the whole model, and its shape there."""

    name: str
    shape: tuple[int, ...]


class Averaging(Protocol):
    """The engine gives one to a layout whose gradients are to travel in another form."""

    @property
    def is_due(self) -> bool:
        """Whether a rank without others has something to add to its gradients."""

    def hook(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """The means of one of DDP's buckets, to be."""

    def rewired(self) -> None:
        """DDP has put its buckets together anew."""

    def average(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], slot: int
    ) -> None:
        """Replace a bucket of gradients by their means. A collective."""

    def scatter(self, parameters: Sequence[UnitParameter], slot: int) -> Callable[[Tensor], Tensor]:
        """A reduce-scatter of a sharded unit's gradients: from a row a rank to the own sum."""


def sparse_embedding(model: nn.Module) -> str | None:
    """The first embedding whose gradient is a list of rows, which DDP's own way alone can send."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return name
    return None


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
