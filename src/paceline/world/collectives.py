"""Collectives: every rank of a group calls, all of them get the result.

Ranks are always named by their rank in the whole world, also in a group. Results carry no
gradient. A tensor may be of any dtype, on any device, non-contiguous, empty or zero-dimensional.

Before data moves, ranks compare what they are about to do (see ``paceline.world.agreement``):
a rank with another operation, shape, dtype or argument makes **every** rank raise
``CollectiveMismatch``, naming each rank's call. ``checks=False``, here or in
``World.init``, saves that exchange; it must be the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.errors import WorldError
from paceline.world.agreement import agree_on_call, explained
from paceline.world.group import Group, rank_problem
from paceline.world.object_collectives import (
    all_gather_object,
    broadcast_object,
    exchange_bytes,
    exchange_objects,
    gather_object,
    scatter_object,
    use_checks,
)
from paceline.world.point_to_point import recv, send
from paceline.world.tensors import (
    as_bytes,
    combine,
    describe,
    from_bytes,
    reduce_problem,
    tensor_problem,
    write_problem,
)
from paceline.world.world import World, resolve_group

__all__ = [
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "gather_object",
    "mean",
    "recv",
    "reduce_scatter",
    "scatter_object",
    "send",
]

_TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
_HALF = (torch.float16, torch.bfloat16)


def all_reduce(
    tensor: torch.Tensor, op: str = "sum", group: Group | None = None, *, checks: bool | None = None
) -> torch.Tensor:
    """Reduce ``tensor`` over all ranks, in place; returns it.

    ``op`` is ``sum``, ``mean``, ``max``, ``min`` or ``product``. The mean of 16-bit floats is
    accumulated in float32; integer sums wrap as they do in torch; NaN wins in ``max`` and ``min``,
    as in ``torch.maximum``. Refused: the mean of integers, anything but max and min of bool (any
    and all), max and min of complex, any reduction of float8 and of unsigned types above 8 bits.
    """
    members = resolve_group(group, "all_reduce")
    problem = tensor_problem("all_reduce", tensor)
    problem = problem or write_problem("all_reduce", tensor)
    problem = problem or reduce_problem("all_reduce", op, tensor.dtype)
    call = f"all_reduce({op}) of {describe(tensor)}"
    agree_on_call(
        members,
        _on_wire(members, call, tensor),
        checks=use_checks(members, checks),
        problem=problem,
    )
    if members.size > 1 and tensor.numel() > 0:
        data = tensor.detach()
        reduced = _all_reduced(members, data, op, call)
        if reduced.data_ptr() != data.data_ptr():
            data.copy_(reduced)
    return tensor


def mean(value: float | torch.Tensor, group: Group | None = None, *, weight: float = 1.0) -> float:
    """The mean of a number over the ranks; ``weight``: what this rank's counts, such as samples.

    Ranks whose weight is 0 count for nothing, whatever their number is.
    """
    members = resolve_group(group, "mean")
    if not weight >= 0:
        raise WorldError(f"mean: weight={weight!r} must be a number, 0 or more.")
    own = [float(value) * weight if weight else 0.0, float(weight)]
    total = all_reduce(torch.tensor(own, dtype=torch.float64), "sum", members)
    if not float(total[1]):
        raise WorldError("mean: the weights of all ranks are 0, so there is nothing to average.")
    return float(total[0] / total[1])


def all_gather(
    tensor: torch.Tensor, group: Group | None = None, *, checks: bool | None = None
) -> list[torch.Tensor]:
    """Every rank's ``tensor``, in rank order; all must have the same shape and dtype.

    For different shapes use ``all_to_all``, or ``all_gather_object`` for small things.
    """
    members = resolve_group(group, "all_gather")
    problem = tensor_problem("all_gather", tensor)
    call = f"all_gather of {describe(tensor)}"
    agree_on_call(
        members,
        _on_wire(members, call, tensor),
        checks=use_checks(members, checks),
        problem=problem,
    )
    if members.size == 1 or tensor.numel() == 0:
        return [tensor.detach().clone() for _ in members.ranks]
    process_group, device = members.wire(tensor.device)
    mine = as_bytes(tensor).to(device)
    parts = [torch.empty_like(mine) for _ in members.ranks]
    with explained(members, call):
        dist.all_gather(parts, mine, group=process_group)
    return [from_bytes(p, tensor.dtype, tuple(tensor.shape), tensor.device) for p in parts]


def reduce_scatter(
    tensor: torch.Tensor, op: str = "sum", group: Group | None = None, *, checks: bool | None = None
) -> torch.Tensor:
    """Reduce ``tensor`` over all ranks; each gets its own slice of dimension 0 of the result.

    Dimension 0 must be a multiple of the number of ranks. ``op`` as in ``all_reduce``; the
    sum is taken in rank order, 16-bit floats in float32.
    """
    members = resolve_group(group, "reduce_scatter")
    problem = tensor_problem("reduce_scatter", tensor)
    problem = problem or reduce_problem("reduce_scatter", op, tensor.dtype)
    if problem is None and (tensor.dim() == 0 or tensor.shape[0] % members.size):
        problem = WorldError(
            f"reduce_scatter: a tensor of shape {tuple(tensor.shape)} cannot be cut into "
            f"{members.size} equal slices along dimension 0: that must be a multiple of the number "
            "of ranks. Pad it, or use all_reduce."
        )
    call = f"reduce_scatter({op}) of {describe(tensor)}"
    agree_on_call(
        members,
        _on_wire(members, call, tensor),
        checks=use_checks(members, checks),
        problem=problem,
    )
    if members.size == 1:
        return tensor.detach().clone()
    # Gloo's own reduce_scatter sends as much as an all_reduce; exchanging slices and reducing
    # them here sends half of that, and adds in the same order on every backend.
    slices = list(tensor.detach().chunk(members.size)) if tensor.shape[0] else []
    if not slices or slices[0].numel() == 0:
        return torch.empty_like(tensor[: tensor.shape[0] // members.size])
    device = members.wire(tensor.device)[1]
    outgoing = [as_bytes(piece).to(device) for piece in slices]
    sizes = [outgoing[0].numel()] * members.size
    incoming = exchange_bytes(members, outgoing, sizes, call)
    shape = tuple(slices[0].shape)
    return combine([from_bytes(p, tensor.dtype, shape, tensor.device) for p in incoming], op)


def broadcast(
    tensor: torch.Tensor, src: int = 0, group: Group | None = None, *, checks: bool | None = None
) -> torch.Tensor:
    """Overwrite ``tensor`` with that of rank ``src``, in place; returns it."""
    members = resolve_group(group, "broadcast")
    problem = tensor_problem("broadcast", tensor)
    problem = problem or write_problem("broadcast", tensor)
    problem = problem or rank_problem(members, src, "broadcast: src")
    call = f"broadcast(src={src}) of {describe(tensor)}"
    agree_on_call(
        members,
        _on_wire(members, call, tensor),
        checks=use_checks(members, checks),
        problem=problem,
    )
    if members.size == 1 or tensor.numel() == 0:
        return tensor
    process_group, device = members.wire(tensor.device)
    data = as_bytes(tensor).to(device)
    with explained(members, call):
        dist.broadcast(data, src, group=process_group)
    target = tensor.detach()
    received = from_bytes(data, tensor.dtype, tuple(tensor.shape), tensor.device)
    if received.data_ptr() != target.data_ptr() and members.ranks[members.rank] != src:
        target.copy_(received)
    return tensor


def all_to_all(
    tensors: Sequence[torch.Tensor], group: Group | None = None, *, checks: bool | None = None
) -> list[torch.Tensor]:
    """Send ``tensors[i]`` to the i-th rank; returns what each rank sent here, in rank order.

    Shapes and dtypes may differ from piece to piece and from rank to rank.
    """
    members = resolve_group(group, "all_to_all")
    problem = _pieces_problem(members, tensors)
    device = tensors[0].device if problem is None else torch.device("cpu")
    call = "all_to_all"
    wire = _on_wire(members, call, tensors[0]) if problem is None else call
    agree_on_call(members, wire, checks=use_checks(members, checks), problem=problem)
    if members.size == 1:
        return [tensors[0].detach().clone()]
    headers = exchange_objects(
        members, [(piece.dtype, tuple(piece.shape)) for piece in tensors], call
    )
    wire_device = members.wire(device)[1]
    outgoing = [as_bytes(piece).to(wire_device) for piece in tensors]
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in headers]
    incoming = exchange_bytes(members, outgoing, sizes, call)
    return [
        from_bytes(data, dtype, shape, device)
        for data, (dtype, shape) in zip(incoming, headers, strict=True)
    ]


def barrier(group: Group | None = None, *, timeout: float | None = None) -> None:
    """Wait until every rank is here.

    After ``timeout`` seconds (default: the world's) raises, naming the ranks that did not come.
    """
    members = resolve_group(group, "barrier")
    problem = None
    if timeout is not None and not timeout > 0:
        problem = WorldError(f"barrier: timeout={timeout!r} must be a number of seconds above 0.")
    limit = None if timeout is None or problem else timedelta(seconds=timeout)
    World.current().wait_at_barrier(members, limit, problem)


def _all_reduced(members: Group, data: torch.Tensor, op: str, call: str) -> torch.Tensor:
    """The reduction of ``data``; in its own memory where the wire takes it as it is."""
    if data.is_complex():
        if op == "product":
            return combine(all_gather(data, members, checks=False), op)
        real = torch.view_as_real(data.resolve_conj().contiguous())
        return torch.view_as_complex(_all_reduced(members, real, op, call))
    process_group, device = members.wire(data.device)
    wire = data.to(device).contiguous()
    if data.dtype == torch.bool:
        wire = wire.view(torch.uint8)
    elif data.dtype == torch.int16:  # neither Gloo nor NCCL knows it; int32 wraps to the same
        wire = wire.to(torch.int32)
    elif data.dtype in _HALF and op == "mean":
        wire = wire.float()
    not_a_number = None
    if op in ("max", "min") and wire.is_floating_point():
        not_a_number = wire.isnan().view(torch.uint8)
    with explained(members, call):
        dist.all_reduce(wire, op=_TORCH_OPS[op], group=process_group)
        if not_a_number is not None:
            dist.all_reduce(not_a_number, op=dist.ReduceOp.MAX, group=process_group)
    if not_a_number is not None:
        wire.masked_fill_(not_a_number.view(torch.bool), torch.nan)
    if op == "mean":
        wire.div_(members.size)
    if data.dtype == torch.bool:
        wire = wire.view(torch.bool)
    return wire.to(data.dtype)


def _on_wire(members: Group, call: str, tensor: object) -> str:
    """The call, with the kind of wire its bytes take: both ends must use the same one."""
    if members.size == 1 or not isinstance(tensor, torch.Tensor):
        return call
    wire = members.wire(tensor.device)[1].type
    return call if wire == "cpu" else f"{call} over {wire}"


def _pieces_problem(members: Group, tensors: object) -> WorldError | None:
    if not isinstance(tensors, list | tuple) or len(tensors) != members.size:
        found = len(tensors) if isinstance(tensors, list | tuple) else f"a {type(tensors).__name__}"
        return WorldError(
            f"all_to_all takes a list of {members.size} tensors, one for each rank; got {found}."
        )
    for piece in tensors:
        if problem := tensor_problem("all_to_all", piece):
            return problem
    if len({piece.device for piece in tensors}) > 1:
        devices = sorted({str(piece.device) for piece in tensors})
        return WorldError(f"all_to_all: the tensors are on different devices: {devices}.")
    return None
