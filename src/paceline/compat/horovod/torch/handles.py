"""Submitting tensors, and the handles by which results are asked for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.compat.horovod.common.exceptions import HorovodInternalError
from paceline.compat.horovod.common.process_sets import ProcessSet
from paceline.compat.horovod.runtime.executor import Submission, result_of
from paceline.compat.horovod.runtime.messages import GLOBAL_SET, Request
from paceline.compat.horovod.runtime.session import Session

DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
)


@dataclass
class _Outstanding:
    submission: Submission
    result: Callable[[Submission], Any]


_numbers = itertools.count()
_outstanding: dict[int, _Outstanding] = {}


def submit(
    operation: str,
    kind: str,
    tensors: Sequence[torch.Tensor],
    *,
    outputs: Sequence[torch.Tensor] = (),
    name: str | None = None,
    process_set: ProcessSet,
    result: Callable[[Submission], Any],
    problem: str = "",
    blocks: bool = False,
    **fields: Any,
) -> int:
    """Submit ``tensors``, one or a group; returns the handle.

    ``operation`` is what the caller called, for the name; ``kind`` what is done. ``problem``: why
    the arguments are no good, which the other ranks are to know as well. ``blocks``: the caller
    waits for it at once.
    """
    session = Session.current()
    members = _members(session, operation, process_set)
    assert process_set.process_set_id is not None
    if name is None:
        full_name = session.background.next_name(operation, process_set.process_set_id)
    else:
        full_name = f"{operation}.{name}"
    in_main_thread = threading.current_thread() is threading.main_thread()
    request = Request(
        session.topology.rank,
        kind,
        full_name,
        process_set.process_set_id,
        blocks=blocks and in_main_thread,
        threaded=not in_main_thread,
        **fields,
    )
    problem = problem or _tensor_problem(tensors)
    if problem:
        request.problem = f"{full_name}: {problem}"
        session.background.report_problem(request)
        raise ValueError(request.problem)
    assert session.topology.rank in members
    request.dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    request.shapes = [list(tensor.shape) for tensor in tensors]
    device = tensors[0].device if tensors else torch.device("cpu")
    request.device = device.type
    submission = Submission(request, list(tensors), list(outputs), device)
    if device.type == "cuda":
        submission.submitted = torch.cuda.current_stream(device).record_event()
    session.background.submit(submission)
    return _handle(submission, result)


def submit_without_tensors(
    kind: str, process_set: ProcessSet, result: Callable[[Submission], Any]
) -> int:
    """Submit a barrier or a join, for which the caller waits at once."""
    session = Session.current()
    _members(session, kind, process_set)
    in_main_thread = threading.current_thread() is threading.main_thread()
    request = Request(
        session.topology.rank,
        kind,
        kind,
        process_set.process_set_id or GLOBAL_SET,
        blocks=in_main_thread,
        threaded=not in_main_thread,
    )
    submission = Submission(request)
    session.background.submit(submission)
    return _handle(submission, result)


def poll(handle: int) -> bool:
    """Whether an asynchronous operation is over, so that ``synchronize`` does not wait."""
    if handle not in _outstanding:
        raise ValueError(
            f"Handle {handle} was not created or has been cleared: synchronize() was called for it."
        )
    submission = _outstanding[handle].submission
    if not submission.done.is_set():
        return False
    return submission.finished is None or submission.finished.query()


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation; returns its output, or a tuple of several.

    Raises ``HorovodInternalError`` where it failed. A second call for the handle returns ``None``.
    """
    found = _outstanding.get(handle)
    if found is None:
        return None
    found.submission.done.wait()
    _outstanding.pop(handle, None)
    if found.submission.error:
        raise HorovodInternalError(found.submission.error)
    return found.result(found.submission)


def forget_handles() -> None:
    """Handles of a job that has ended mean nothing in the next."""
    _outstanding.clear()


def only_output(submission: Submission) -> torch.Tensor:
    """The result of a collective of one tensor."""
    return result_of(submission)[0]


def all_outputs(submission: Submission) -> tuple[torch.Tensor, ...]:
    """The results of a group."""
    return tuple(result_of(submission))


def _handle(submission: Submission, result: Callable[[Submission], Any]) -> int:
    handle = next(_numbers)
    _outstanding[handle] = _Outstanding(submission, result)
    return handle


def _members(session: Session, operation: str, process_set: ProcessSet) -> list[int]:
    """The ranks of ``process_set``; refused where this rank is none of them."""
    title = operation.removeprefix("grouped_").capitalize()
    members = session.process_sets.get(
        -1 if process_set.process_set_id is None else process_set.process_set_id
    )
    if members is None:
        raise ValueError(
            f"{title}: Process set provided does not exist, or has not been registered: "
            f"{process_set}."
        )
    if session.topology.rank not in members:
        raise ValueError(
            f"{title}: Rank {session.topology.rank} is not a member of the provided process set, "
            f"which has ranks {members}. Ask process_set.included() first."
        )
    return members


def empty_output(tensor: Any) -> Any:
    """Where the result for ``tensor`` goes. What is no tensor is left to ``submit`` to refuse.

    It is refused there, and not by torch at once, since the other ranks must hear of it.
    """
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).detach()


def _tensor_problem(tensors: Sequence[Any]) -> str:
    """Why these cannot travel together; empty if they can."""
    if not tensors:
        return "there is no tensor in the list."
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            return f"expected a torch.Tensor, got a {type(tensor).__name__}."
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            return f"Tensor type {tensor.type()} is not supported."
        if tensor.device.type not in ("cpu", "cuda"):
            return f"tensors on the device {tensor.device} are not supported."
        if tensor.device != tensors[0].device:
            return "Tensors in list must be on same device."
    return ""
