"""allreduce and reducescatter, in all their forms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.compat.horovod.common import basics
from paceline.compat.horovod.common.exceptions import HorovodInternalError
from paceline.compat.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.compat.horovod.common.reduce_ops import NAMES, Adasum, Average, Sum
from paceline.compat.horovod.torch.gathers import allgather, allgather_async, grouped_allgather
from paceline.compat.horovod.torch.handles import (
    all_outputs,
    empty_output,
    only_output,
    submit,
    synchronize,
)


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """The reduction that is meant by ``op``, or by the older ``average``; not by both."""
    if op is not None:
        if average is not None:
            raise ValueError(
                "The op parameter supersedes average. Please provide only one of them."
            )
        return op
    if average is None:
        return Average
    warnings.warn(
        "Parameter `average` has been replaced with `op` and will be removed in v1.0",
        DeprecationWarning,
        stacklevel=3,
    )
    return Average if average else Sum


def _submit_reduction(
    operation: str,
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    *,
    blocks: bool = False,
) -> int:
    if op == Adasum:
        _check_adasum(process_set)
    return submit(
        operation,
        "adasum" if op == Adasum else "allreduce",
        tensors,
        outputs=outputs,
        name=name,
        process_set=process_set,
        result=all_outputs if operation.startswith("grouped") else only_output,
        problem=_reduction_problem(tensors, op, prescale_factor, postscale_factor),
        blocks=blocks,
        op=op,
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
    )


def _check_adasum(process_set: ProcessSet) -> None:
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    size = basics.size()
    if size & (size - 1):
        raise NotImplementedError(
            f"Running Adasum with non-power of 2 ranks is not supported yet: there are {size}."
        )


def _reduction_problem(tensors: Sequence[Any], op: int, prescale: float, postscale: float) -> str:
    if op not in NAMES:
        return f"op={op!r} must be hvd.{', hvd.'.join(NAMES.values())}."
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            continue  # refused for being none
        if tensor.dtype == torch.bool and (op == Average or (prescale, postscale) != (1.0, 1.0)):
            return (
                "bool tensors cannot be averaged or scaled. Use op=hvd.Sum (any), hvd.Product "
                "(all), hvd.Min or hvd.Max, or convert them to a number."
            )
        if op == Adasum and not tensor.is_floating_point():
            return f"Adasum is for floating-point tensors, not {tensor.dtype}."
    return ""


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce ``tensor`` over all ranks; returns a handle for ``synchronize``."""
    op = handle_average_backwards_compatibility(op, average)
    output = empty_output(tensor)
    return _submit_reduction(
        "allreduce", [tensor], [output], name, op, prescale_factor, postscale_factor, process_set
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As ``allreduce_async``, in place."""
    op = handle_average_backwards_compatibility(op, average)
    return _submit_reduction(
        "allreduce", [tensor], [tensor], name, op, prescale_factor, postscale_factor, process_set
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce ``tensor`` over all ranks, in place."""
    op = handle_average_backwards_compatibility(op, average)
    handle = _submit_reduction(
        "allreduce",
        [tensor],
        [tensor],
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        blocks=True,
    )
    return synchronize(handle)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce ``tensor`` over all ranks, by ``op`` (default: ``Average``); returns the result.

    Ranks may submit tensors in any order: those of one ``name`` meet. Gradients flow through it.
    """
    op = handle_average_backwards_compatibility(op, average)
    compressed, restore = compress(compression, tensor)
    reduced = _Allreduce.apply(
        "allreduce", name, op, prescale_factor, postscale_factor, process_set, compressed
    )
    return restore(reduced[0])


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce a list of tensors as one operation; returns a handle for ``synchronize``."""
    op = handle_average_backwards_compatibility(op, average)
    outputs = [empty_output(tensor) for tensor in tensors]
    return _submit_reduction(
        "grouped_allreduce",
        tensors,
        outputs,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As ``grouped_allreduce_async``, in place."""
    op = handle_average_backwards_compatibility(op, average)
    return _submit_reduction(
        "grouped_allreduce",
        tensors,
        tensors,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduce a list of tensors as one operation, in place."""
    op = handle_average_backwards_compatibility(op, average)
    handle = _submit_reduction(
        "grouped_allreduce",
        tensors,
        tensors,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        blocks=True,
    )
    return synchronize(handle)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce a list of tensors as one operation; returns the results. Gradients flow through it."""
    op = handle_average_backwards_compatibility(op, average)
    pairs = [compress(compression, tensor) for tensor in tensors]
    reduced = _Allreduce.apply(
        "grouped_allreduce",
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        *(compressed for compressed, _ in pairs),
    )
    return [restore(tensor) for tensor, (_, restore) in zip(reduced, pairs, strict=True)]


class _Allreduce(torch.autograd.Function):
    """The gradient of a reduction is the same reduction of the gradients."""

    @staticmethod
    def forward(ctx: Any, operation: str, name: str | None, *arguments: Any) -> Any:
        op, prescale, postscale, process_set, *tensors = arguments
        ctx.operation, ctx.arguments = operation, (op, prescale, postscale, process_set)
        outputs = [empty_output(t) for t in tensors]
        handle = _submit_reduction(
            operation, tensors, outputs, name, op, prescale, postscale, process_set, blocks=True
        )
        result = synchronize(handle)
        return result if isinstance(result, tuple) else (result,)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        reduced = _Allreduce.apply(
            ctx.operation, None, *ctx.arguments, *(g.contiguous() for g in gradients)
        )
        return (None, None, None, None, None, None, *reduced)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str,
    op: int,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Begin to sum or average a sparse tensor over all ranks; returns a function that waits.

    Indices and values are gathered. What several ranks have at one place appears several times:
    ``coalesce()`` adds it up.
    """
    indices = tensor._indices().transpose(0, 1).contiguous()
    indices_handle = allgather_async(indices, name=f"{name}.indices", process_set=process_set)
    values_handle = allgather_async(
        tensor._values(), name=f"{name}.values", process_set=process_set
    )

    def handle() -> torch.Tensor:
        values, indices = synchronize(values_handle), synchronize(indices_handle)
        if op == Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(
            indices.transpose(0, 1),
            values,
            tensor.size(),
            device=tensor.device,
            check_invariants=False,
        )

    return handle


# ---- reducescatter ----


def _submit_reducescatter(
    operation: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
    *,
    blocks: bool = False,
) -> int:
    if op not in (Average, Sum):
        raise HorovodInternalError(
            f"Reducescatter currently only supports AVERAGE and SUM, not {NAMES.get(op, op)}."
        )
    return submit(
        operation,
        "reducescatter",
        tensors,
        name=name,
        process_set=process_set,
        result=all_outputs if operation.startswith("grouped") else only_output,
        problem=_reduction_problem(tensors, op, prescale_factor, postscale_factor),
        blocks=blocks,
        op=op,
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
    )


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to reduce ``tensor``, of which each rank gets its rows; returns a handle."""
    return _submit_reducescatter(
        "reducescatter", [tensor], name, op, process_set, prescale_factor, postscale_factor
    )


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce ``tensor`` over all ranks; each gets its share of the rows, the first ones one more.

    ``op`` is ``Average`` or ``Sum``. Gradients flow through it.
    """
    compressed, restore = compress(compression, tensor)
    (reduced,) = _Reducescatter.apply(
        "reducescatter", name, op, process_set, prescale_factor, postscale_factor, compressed
    )
    return restore(reduced)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin a ``reducescatter`` of a list of tensors as one operation; returns a handle."""
    return _submit_reducescatter(
        "grouped_reducescatter", tensors, name, op, process_set, prescale_factor, postscale_factor
    )


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """``reducescatter`` of a list of tensors as one operation. Gradients flow through it."""
    pairs = [compress(compression, tensor) for tensor in tensors]
    reduced = _Reducescatter.apply(
        "grouped_reducescatter",
        name,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
        *(compressed for compressed, _ in pairs),
    )
    return [restore(tensor) for tensor, (_, restore) in zip(reduced, pairs, strict=True)]


class _Reducescatter(torch.autograd.Function):
    """The gradients of all ranks' rows together, times the number of ranks for ``Sum``."""

    @staticmethod
    def forward(ctx: Any, operation: str, name: str | None, *arguments: Any) -> Any:
        op, process_set, prescale, postscale, *tensors = arguments
        ctx.process_set = process_set
        ctx.factor = prescale * postscale * (process_set.size() if op == Sum else 1)
        handle = _submit_reducescatter(
            operation, tensors, name, op, process_set, prescale, postscale, blocks=True
        )
        result = synchronize(handle)
        return result if isinstance(result, tuple) else (result,)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        scaled = [gradient * ctx.factor for gradient in gradients]
        if len(scaled) == 1:
            gathered = [allgather(scaled[0], process_set=ctx.process_set)]
        else:
            gathered = list(grouped_allgather(scaled, process_set=ctx.process_set))
        return (None, None, None, None, None, None, *gathered)


def compress(
    compression: Any, tensor: torch.Tensor
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """What to send for ``tensor``, and how to restore the result; ``None``: as it is."""
    if compression is None:
        return tensor, lambda result: result
    compressed, context = compression.compress(tensor)
    return compressed, lambda result: compression.decompress(result, context)
