"""allgather, broadcast and alltoall in all their forms; barrier and join."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.compat.horovod.common import basics
from paceline.compat.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.compat.horovod.common.reduce_ops import Average
from paceline.compat.horovod.runtime.executor import Submission, result_of
from paceline.compat.horovod.runtime.session import Session
from paceline.compat.horovod.torch.handles import (
    all_outputs,
    empty_output,
    only_output,
    submit,
    submit_without_tensors,
    synchronize,
)


def _submit_allgather(
    operation: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    blocks: bool = False,
) -> int:
    return submit(
        operation,
        "allgather",
        tensors,
        name=name,
        process_set=process_set,
        result=all_outputs if operation.startswith("grouped") else only_output,
        blocks=blocks,
    )


def allgather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to put all ranks' tensors one after the other; returns a handle for ``synchronize``."""
    return _submit_allgather("allgather", [tensor], name, process_set)


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """All ranks' tensors one after the other, along the first dimension, which may differ.

    Gradients flow through it.
    """
    (gathered,) = _Allgather.apply("allgather", name, process_set, tensor)
    return gathered


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin an ``allgather`` of a list of tensors as one operation; returns a handle."""
    return _submit_allgather("grouped_allgather", tensors, name, process_set)


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """``allgather`` of a list of tensors as one operation. Gradients flow through it."""
    return _Allgather.apply("grouped_allgather", name, process_set, *tensors)


class _Allgather(torch.autograd.Function):
    """A rank's gradient is its own rows of the average of all ranks' gradients."""

    @staticmethod
    def forward(
        ctx: Any, operation: str, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> Any:
        ctx.process_set = process_set
        handle = _submit_allgather(operation, tensors, name, process_set, blocks=True)
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        result = synchronize(handle)
        return result if isinstance(result, tuple) else (result,)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        rows = allgather(torch.tensor([ctx.rows]), process_set=ctx.process_set)
        place = ctx.process_set.rank()
        mine = []
        for number, gradient in enumerate(gradients):
            averaged = _averaged(gradient, ctx.process_set)
            begin = int(rows[:place, number].sum())
            mine.append(averaged.narrow(0, begin, ctx.rows[number]))
        return (None, None, None, *mine)


def _averaged(gradient: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    """The average of all ranks' gradients."""
    output = torch.empty_like(gradient, memory_format=torch.contiguous_format)
    handle = submit(
        "allreduce",
        "allreduce",
        [gradient],
        outputs=[output],
        process_set=process_set,
        result=only_output,
        blocks=True,
        op=Average,
    )
    return synchronize(handle)


# ---- broadcast ----


def _submit_broadcast(
    tensor: torch.Tensor,
    output: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    blocks: bool = False,
) -> int:
    members = Session.current().process_sets.get(process_set.process_set_id or 0, [])
    problem = (
        ""
        if root_rank in members
        else f"broadcast received invalid root rank {root_rank} for provided process set {members}."
    )
    return submit(
        "broadcast",
        "broadcast",
        [tensor],
        outputs=[output],
        name=name,
        process_set=process_set,
        result=only_output,
        problem=problem,
        blocks=blocks,
        root=-1 if problem else members.index(root_rank),
    )


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to hand out the tensor of ``root_rank``; returns a handle for ``synchronize``."""
    output = empty_output(tensor)
    return _submit_broadcast(tensor, output, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As ``broadcast_async``, in place."""
    return _submit_broadcast(tensor, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite ``tensor`` with that of ``root_rank``."""
    return synchronize(_submit_broadcast(tensor, tensor, root_rank, name, process_set, blocks=True))


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The tensor of ``root_rank``, a rank of the whole job. Gradients flow through it."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)


class _Broadcast(torch.autograd.Function):
    """The gradient of the root is the average of all ranks' gradients; the others' is zero."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root: int, name: str | None, process_set: ProcessSet
    ) -> Any:
        ctx.root, ctx.process_set = root, process_set
        output = empty_output(tensor)
        return synchronize(_submit_broadcast(tensor, output, root, name, process_set, blocks=True))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        averaged = _averaged(gradient, ctx.process_set)
        if basics.rank() != ctx.root:
            averaged = torch.zeros_like(averaged)
        return averaged, None, None, None


# ---- alltoall ----


def _submit_alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None,
    name: str | None,
    process_set: ProcessSet,
    *,
    blocks: bool = False,
) -> int:
    counts = splits
    if counts is not None and not isinstance(counts, torch.Tensor):
        counts = torch.tensor(list(counts), dtype=torch.int32)
    size = process_set.size() or 1
    problem = _splits_problem(tensor, counts, size)
    if problem:
        sent = []
    elif counts is None or counts.numel() == 0:
        sent = [tensor.shape[0] // size if tensor.dim() else 0] * size
    else:
        sent = counts.tolist()
    device = counts.device if counts is not None else torch.device("cpu")

    def result(submission: Submission) -> tuple[torch.Tensor, torch.Tensor]:
        received = torch.tensor(submission.received_splits, dtype=torch.int32, device=device)
        return result_of(submission)[0], received

    return submit(
        "alltoall",
        "alltoall",
        [tensor],
        name=name,
        process_set=process_set,
        result=result,
        problem=problem,
        blocks=blocks,
        splits=sent,
    )


def _splits_problem(tensor: torch.Tensor, splits: torch.Tensor | None, size: int) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"expected a torch.Tensor, got a {type(tensor).__name__}."
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits is None or splits.numel() == 0:
        if rows % size:
            return (
                f"splits not provided, but first dimension of tensor ({rows}) is not an even "
                f"multiple of the number of workers ({size})."
            )
        return ""
    if splits.dim() > 1:
        return f"alltoall expects a 1D splits tensor, not one of shape {tuple(splits.shape)}."
    if splits.dtype != torch.int32:
        return f"alltoall expects splits to contain 32-bit integer elements, not {splits.dtype}."
    if splits.numel() != size:
        return (
            f"Number of entries in splits ({splits.numel()}) does not equal number of workers "
            f"({size})."
        )
    if int(splits.min()) < 0:
        return f"splits must not be negative: {splits.tolist()}."
    if int(splits.sum()) > rows:
        return (
            f"Sum of splits entries ({int(splits.sum())}) is greater than the first dimension of "
            f"tensor ({rows})."
        )
    return ""


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin an ``alltoall``; ``synchronize`` returns the rows and how many came from each rank."""
    return _submit_alltoall(tensor, splits, name, process_set)


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send ``splits[i]`` rows to rank i; returns what all ranks sent here, in their order.

    Without ``splits`` every rank gets equally many. With them, also returns how many rows came from
    each rank. Gradients flow through it.
    """
    output, received = _Alltoall.apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


class _Alltoall(torch.autograd.Function):
    """Gradients go back the way the rows came."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> Any:
        handle = _submit_alltoall(tensor, splits, name, process_set, blocks=True)
        output, received = synchronize(handle)
        ctx.process_set, ctx.received, ctx.rows = process_set, received, tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        handle = _submit_alltoall(gradient, ctx.received, None, ctx.process_set, blocks=True)
        back, _ = synchronize(handle)
        unsent = ctx.rows - back.shape[0]
        if unsent:  # rows beyond the splits went nowhere
            back = torch.cat([back, back.new_zeros(unsent, *back.shape[1:])])
        return back, None, None, None


# ---- barrier and join ----


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of ``process_set`` is here."""
    synchronize(submit_without_tensors("barrier", process_set, lambda _: None))


def join(device: int = -1) -> int:
    """Say that this rank has no data left, and wait for the others; returns who came last.

    Until then it takes part in the others' ``allreduce`` with zeros, made on the GPU ``device``
    where they reduce on GPUs. An average still divides by all ranks.
    """
    if device >= 0 and torch.cuda.is_available():
        Session.current().executor.join_device = torch.device("cuda", device)
    return synchronize(
        submit_without_tensors("join", global_process_set, lambda submission: submission.value)
    )
