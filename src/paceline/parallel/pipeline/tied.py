"""Parameters that several stages hold: one gradient for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.errors import TrainingError

Copies = Mapping[int, nn.Parameter]
"""The copies of a parameter on this rank, by stage."""


@torch.no_grad()
def sum_gradients(
    name: str, copies: Copies, holders: Sequence[int], rank_of: Sequence[int], group: object
) -> None:
    """Give every copy of a parameter the sum of the gradients of all copies.

    ``holders`` are the stages that have one, ``rank_of`` the rank of each stage in ``group``. Every
    holder adds in the order of the stages, so that all get the same sum to the bit. To be called by
    all ranks that hold a copy.
    """
    own = dist.get_rank(group)  # type: ignore[arg-type]
    local = {stage: _gradient(name, parameter) for stage, parameter in copies.items()}
    example = next(iter(local.values()))
    gradients = dict(local)
    works = []
    for stage in holders:
        if rank_of[stage] != own:
            gradients[stage] = torch.empty_like(example)
            works.append(dist.irecv(gradients[stage], group=group, group_src=rank_of[stage]))  # type: ignore[arg-type]
    others = dict.fromkeys(rank_of[stage] for stage in holders if rank_of[stage] != own)
    for stage in holders:
        if rank_of[stage] == own:
            for other in others:
                works.append(dist.isend(local[stage], group=group, group_dst=other))  # type: ignore[arg-type]
    for work in works:
        if work is not None:
            work.wait()
    total = gradients[holders[0]].clone()
    for stage in holders[1:]:
        total += gradients[stage]
    for parameter in copies.values():
        _local(parameter.grad if parameter.grad is not None else _empty(parameter)).copy_(total)


def _gradient(name: str, parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if parameter.grad.is_sparse:
        raise TrainingError(
            f"pipeline: the gradient of {name!r} is sparse, and several stages share it. Use "
            "sparse=False in the embedding."
        )
    return _local(parameter.grad).contiguous()


def _empty(parameter: nn.Parameter) -> Tensor:
    parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
