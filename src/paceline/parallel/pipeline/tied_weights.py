"""Parameters that several stages hold: one gradient for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.errors import TrainingError

Copies = Mapping[int, nn.Parameter]
"""The copies of a parameter on this rank, by stage."""


@torch.no_grad()
def sum_gradients(
    name: str, copies: Copies, holders: Sequence[int], rank_of: Sequence[int], group: Any
) -> None:
    """Give every copy of a parameter the sum of the gradients of all copies.

    ``holders`` are the stages that have one, ``rank_of`` the rank of each stage in ``group``. Every
    holder adds in the order of the stages, so that all sums are bitwise-identical. To be called by
    all ranks that hold a copy.
    """
    own = dist.get_rank(group)
    local = {stage: _gradient(name, parameter) for stage, parameter in copies.items()}
    example = next(iter(local.values()))
    gradients = dict(local)
    messages: list[dist.P2POp] = []
    for stage in holders:
        if rank_of[stage] != own:
            gradients[stage] = torch.empty_like(example)
            messages.append(_op(dist.irecv, gradients[stage], rank_of[stage], group))
    others = dict.fromkeys(rank_of[stage] for stage in holders if rank_of[stage] != own)
    mine = [local[stage] for stage in holders if rank_of[stage] == own]
    messages += [_op(dist.isend, tensor, rank, group) for tensor in mine for rank in others]
    exchange(messages)
    total = gradients[holders[0]].clone()
    for stage in holders[1:]:
        total += gradients[stage]
    for parameter in copies.values():
        assert parameter.grad is not None
        _local(parameter.grad).copy_(total)


@torch.no_grad()
def copy_values(copies: Copies, holders: Sequence[int], rank_of: Sequence[int], group: Any) -> None:
    """Give every copy of a parameter the values of the first stage's; as ``sum_gradients``."""
    own, first = dist.get_rank(group), holders[0]
    if rank_of[first] == own:
        values = _local(copies[first]).contiguous()
        others = dict.fromkeys(rank_of[stage] for stage in holders if rank_of[stage] != own)
        exchange([_op(dist.isend, values, rank, group) for rank in others])
    else:
        values = torch.empty_like(_local(next(iter(copies.values()))))
        exchange([_op(dist.irecv, values, rank_of[first], group)])
    for parameter in copies.values():
        _local(parameter).copy_(values)


def exchange(messages: list[dist.P2POp]) -> None:
    """Begin all messages at once, and wait for them.

    In one batch: NCCL runs single messages in the order in which they were begun, so two ranks
    that both receive first would wait for each other for good.
    """
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()


def _op(operation: Any, tensor: Tensor, rank: int, group: Any) -> dist.P2POp:
    return dist.P2POp(operation, tensor, group=group, group_peer=rank)


def looks(parameter: nn.Parameter) -> str:
    """What two copies must have in common, or their gradients cannot be added."""
    local = _local(parameter)
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return f"{local.dtype} {tuple(local.shape)} {tuple(map(str, placements))}"


def check_alike(name: str, seen: Mapping[int, str]) -> None:
    """Refuse copies of ``name`` that are split in different ways; ``seen`` is ``looks``."""
    if len(set(seen.values())) > 1:
        listed = ", ".join(f"stage {stage}: {look}" for stage, look in sorted(seen.items()))
        raise TrainingError(
            f"pipeline: the stages that share {name!r} hold it in different pieces ({listed}), so "
            "their gradients cannot be added. Give all modules that share it the same tensor "
            "parallel plan, or untie it."
        )


def _gradient(name: str, parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if parameter.grad.is_sparse:
        raise TrainingError(
            f"pipeline: the gradient of {name!r} is sparse, and several stages share it. Use "
            "sparse=False in the embedding."
        )
    return _local(parameter.grad).contiguous()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
