"""What a rank does for a response: takes its tensors, moves them, writes the results."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.compat.horovod.common.reduce_ops import Average
from paceline.compat.horovod.runtime.arithmetic import adasum_pair, rows_of, scale, widened
from paceline.compat.horovod.runtime.channels import Channel, Channels, GpuChannel
from paceline.compat.horovod.runtime.messages import Request, Response


@dataclass
class Submission:
    """One call of a collective on this rank, from its submission to its result."""

    request: Request
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    """Where results of a known shape go; others are made when the shape is known."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    submitted: torch.cuda.Event | None = None
    """On the caller's stream: the inputs are there."""
    finished: torch.cuda.Event | None = None
    """On our stream: the outputs are there."""
    value: int = -1
    """Of a join or a process set; see ``Response.value``."""
    received_splits: list[int] = field(default_factory=list)
    error: str = ""
    done: threading.Event = field(default_factory=threading.Event)


class Executor:
    """Runs responses, one after the other, in a thread of its own."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.join_device = torch.device("cpu")
        """Where a rank that has joined makes its zeros, if the others reduce on GPUs."""

    def run(self, response: Response, submissions: Sequence[Submission]) -> None:
        """Do what ``response`` says; no ``submissions``: this rank has joined, and adds zeros."""
        if response.kind in ("barrier", "join", "add_process_set", "remove_process_set"):
            for submission in submissions:
                submission.value = response.value
            return
        channel = self._channels.get(response.process_set, response.device)
        device = submissions[0].device if submissions else self._device_of(response)
        with self._ordered(device, submissions):
            if response.kind in ("allreduce", "adasum"):
                self._reduce(channel, response, submissions, device)
            elif response.kind == "allgather":
                _allgather(channel, response, submissions[0])
            elif response.kind == "broadcast":
                _broadcast(channel, submissions[0], response.root)
            elif response.kind == "alltoall":
                _alltoall(channel, response, submissions[0])
            else:
                _reducescatter(channel, response, submissions[0])

    def _device_of(self, response: Response) -> torch.device:
        return torch.device("cpu") if response.device == "cpu" else self.join_device

    @contextlib.contextmanager
    def _ordered(self, device: torch.device, submissions: Sequence[Submission]) -> Iterator[None]:
        """Work on a stream of our own, after the caller's; the caller waits for ``finished``."""
        if device.type != "cuda":
            yield
            return
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            for submission in submissions:
                assert submission.submitted is not None
                stream.wait_event(submission.submitted)
                for tensor in (*submission.inputs, *submission.outputs):
                    tensor.record_stream(stream)  # its memory is not reused before we are done
            yield
            for submission in submissions:
                submission.finished = stream.record_event()

    def _reduce(
        self,
        channel: Channel,
        response: Response,
        submissions: Sequence[Submission],
        device: torch.device,
    ) -> None:
        outputs = [output for submission in submissions for output in submission.outputs]
        inputs = [tensor for submission in submissions for tensor in submission.inputs]
        if not submissions:
            outputs = inputs = [
                torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
                for shapes, dtypes in zip(response.shapes, response.dtypes, strict=True)
                for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
        if response.kind == "adasum":
            for tensor, output in zip(inputs, outputs, strict=True):
                output.data.copy_(_adasum(channel, tensor, response))
            return
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place, tensor in enumerate(inputs):
            by_dtype.setdefault(tensor.dtype, []).append(place)
        for places in by_dtype.values():
            flat = [inputs[place].detach().reshape(-1) for place in places]
            fused = _to_wire(channel, flat[0].clone() if len(flat) == 1 else torch.cat(flat))
            reduced = _reduced(channel, fused, response)
            pieces = reduced.split([tensor.numel() for tensor in flat])
            for place, piece in zip(places, pieces, strict=True):
                outputs[place].data.copy_(piece.reshape(outputs[place].shape))


def _reduced(channel: Channel, flat: torch.Tensor, response: Response) -> torch.Tensor:
    flat = scale(flat, response.prescale)
    factor = _factor_after(channel, response)
    return channel.reduce(flat, response.op, lambda piece: scale(piece, factor))


def _factor_after(channel: Channel, response: Response) -> float:
    if response.op == Average:
        return response.postscale / channel.size
    return response.postscale


def _adasum(channel: Channel, tensor: torch.Tensor, response: Response) -> torch.Tensor:
    """All members' tensors in one, pair by pair: 0 with 1, then 01 with 23, and so on."""
    scaled = scale(tensor.detach().reshape(-1), response.prescale)
    mine = _to_wire(channel, widened(scaled).clone())
    distance = 1
    while distance < channel.size:
        peer = channel.rank ^ distance
        other = channel.swap(mine, peer)
        mine = adasum_pair(mine, other) if channel.rank < peer else adasum_pair(other, mine)
        distance *= 2
    return scale(mine.to(tensor.dtype), response.postscale).reshape(tensor.shape)


def _allgather(channel: Channel, response: Response, submission: Submission) -> None:
    for tensor, dims in zip(submission.inputs, response.first_dims, strict=True):
        row = math.prod(tensor.shape[1:])
        flat = _to_wire(channel, tensor.detach().reshape(-1))
        gathered = channel.gather(flat, [dim * row for dim in dims])
        shape = (sum(dims), *tensor.shape[1:])
        submission.outputs.append(gathered.reshape(shape).to(tensor.device))


def _broadcast(channel: Channel, submission: Submission, root: int) -> None:
    for tensor, output in zip(submission.inputs, submission.outputs, strict=True):
        flat = _to_wire(channel, tensor.detach().reshape(-1).clone())
        channel.broadcast(flat, root)
        output.data.copy_(flat.reshape(output.shape))


def _alltoall(channel: Channel, response: Response, submission: Submission) -> None:
    (tensor,) = submission.inputs
    row = math.prod(tensor.shape[1:])
    sent = response.splits[channel.rank]
    received = [splits[channel.rank] for splits in response.splits]
    flat = _to_wire(channel, tensor.detach()[: sum(sent)].reshape(-1))
    output = channel.exchange(
        flat, [count * row for count in sent], [count * row for count in received]
    )
    shape = (sum(received), *tensor.shape[1:])
    submission.outputs.append(output.reshape(shape).to(tensor.device))
    submission.received_splits = received


def _reducescatter(channel: Channel, response: Response, submission: Submission) -> None:
    factor = _factor_after(channel, response)
    for tensor in submission.inputs:
        row = math.prod(tensor.shape[1:])
        rows = rows_of(tensor.shape[0], channel.size)
        flat = scale(_to_wire(channel, tensor.detach().reshape(-1)), response.prescale)
        mine = channel.reduce_pieces(
            flat, [count * row for count in rows], response.op, lambda piece: scale(piece, factor)
        )
        shape = (rows[channel.rank], *tensor.shape[1:])
        submission.outputs.append(mine.reshape(shape).to(tensor.device))


def _to_wire(channel: Channel, flat: torch.Tensor) -> torch.Tensor:
    """``flat`` where the channel takes it from: GPU tensors without NCCL go by host memory."""
    return (flat if isinstance(channel, GpuChannel) else flat.to("cpu")).contiguous()


def result_of(submission: Submission) -> Any:
    """Waits on the caller's stream for the outputs, and hands them to it."""
    if submission.finished is not None:
        stream = torch.cuda.current_stream(submission.device)
        stream.wait_event(submission.finished)
        for output in submission.outputs:
            output.record_stream(stream)
    return submission.outputs
