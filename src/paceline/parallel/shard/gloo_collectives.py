"""What sharded ranks send each other, on Gloo: pieces put together, and gradients summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.world import World

# torch 2.13 renamed it, and warns about the old name.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Allocates:
    """What FSDP asks of both exchanges beside the exchange itself."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Memory for FSDP to put the pieces in, or the result."""
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Allocates):
    """An all-gather that tells the pulse that this rank waits; to be given to FSDP.

    On the CPU FSDP's all-gathers return when they are through.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` with the pieces of all ranks of ``group``."""
        with World.current().pulse.during("waiting"):
            return _gather(output_tensor, input_tensor, group=group, async_op=async_op)


class ExchangeAndSum(_Allocates):
    """A reduce-scatter that sends each rank only its own piece; to be given to FSDP.

    Gloo's own sends what an all-reduce would, twice as much. Here the pieces are exchanged and
    added up where they arrive, in the order of the ranks, so that the sum is always the same.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Fill ``output_tensor`` with this rank's piece of the sum or the mean over ``group``."""
        arrived = torch.empty_like(input_tensor)
        with World.current().pulse.during("waiting"):
            dist.all_to_all_single(arrived, input_tensor, group=group)
        torch.sum(arrived.view(group.size(), -1), dim=0, out=output_tensor)
        _divide(output_tensor, group, op)


class SumBy(_Allocates):
    """A reduce-scatter by somebody else's ``message``: from a row for each rank to the own sum."""

    def __init__(self, message: Callable[[Tensor], Tensor]) -> None:
        self._message = message

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Fill ``output_tensor`` with this rank's piece of the sum or the mean over ``group``."""
        with World.current().pulse.during("waiting"):
            output_tensor.copy_(self._message(input_tensor))
        _divide(output_tensor, group, op)


def _divide(total: Tensor, group: dist.ProcessGroup, op: Any) -> None:
    if op == dist.ReduceOp.AVG:
        total.div_(group.size())
    elif op != dist.ReduceOp.SUM:
        raise NotImplementedError(f"a reduce-scatter by {op}, which is neither a sum nor a mean")
