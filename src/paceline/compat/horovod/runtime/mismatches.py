"""Whether the requests of all ranks for one name fit together, and if not, in which words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.compat.horovod.common import reduce_ops
from paceline.compat.horovod.runtime.messages import Request

REDUCTIONS = ("allreduce", "adasum", "reducescatter")
_SAME_SHAPE = (*REDUCTIONS, "broadcast")
_FIRST_DIM_MAY_DIFFER = ("allgather", "alltoall")
_NEEDS_A_DIMENSION = (*_FIRST_DIM_MAY_DIFFER, "reducescatter")
_NOT_WITH_JOIN = ("allgather", "alltoall", "reducescatter", "broadcast")


def problem_of(requests: Mapping[int, Request], joined: bool) -> str:
    """Why the members cannot do this together, for all of them to raise; empty if they can."""
    ordered = [requests[rank] for rank in sorted(requests)]
    first = ordered[0]
    for request in ordered:
        if request.problem:
            return (
                f"{first.name}: rank {request.rank} could not take part: {request.problem} The "
                "other ranks did, and cannot go on without it."
            )
    for what, value in _compared(first):
        for other in ordered[1:]:
            mine, theirs = value(first), value(other)
            if mine != theirs:
                return (
                    f"Mismatched {what} for {first.name}: rank {first.rank} has {mine}, but rank "
                    f"{other.rank} has {theirs}. Every rank must submit the same."
                )
    if joined and first.kind in _NOT_WITH_JOIN:
        hint = (
            " Specify sparse_as_dense=True if using DistributedOptimizer."
            if first.kind == "allgather"
            else ""
        )
        return f"{first.name}: {first.kind} is not supported with Join at this time.{hint}"
    if first.kind in _NEEDS_A_DIMENSION:
        for shape in first.shapes:
            if not shape:
                return (
                    f"{first.name}: rank {first.rank} tried to {first.kind} a rank-zero tensor; it "
                    "needs a first dimension. Use tensor.reshape(1)."
                )
    return ""


def _compared(first: Request) -> list[tuple[str, Callable[[Request], Any]]]:
    """What must be the same on all ranks, each with how to read it from a request."""
    kind = first.kind
    compared: list[tuple[str, Callable[[Request], Any]]] = [
        ("operations", lambda request: request.kind),
        ("numbers of tensors", lambda request: len(request.shapes)),
        ("data types", lambda request: _one_or_all(request.dtypes)),
    ]
    if kind in _SAME_SHAPE:
        compared.append((f"{kind} tensor shapes", lambda request: _one_or_all(request.shapes)))
    if kind in _FIRST_DIM_MAY_DIFFER:
        compared.append(
            (
                f"{kind} tensor shapes (only the first dimension may differ)",
                lambda request: _one_or_all(
                    [["*", *shape[1:]] if shape else [] for shape in request.shapes]
                ),
            )
        )
    if kind in REDUCTIONS:
        compared += [
            ("reduction operations", lambda request: reduce_ops.NAMES.get(request.op, request.op)),
            (
                "prescale and/or postscale factors",
                lambda request: (request.prescale, request.postscale),
            ),
        ]
    if kind == "broadcast":
        compared.append(("root ranks", lambda request: request.root))
    if kind in ("add_process_set", "remove_process_set"):
        compared.append(("process sets", lambda request: request.ranks))
    compared.append(("devices", lambda request: request.device))
    return compared


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values
