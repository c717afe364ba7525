"""Data parallelism: a copy of the model on every rank, gradients averaged by torch's DDP."""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.ddp_teardown import free_reducer_before_group
from paceline.parallel.averaging import Averaging
from paceline.world import Group

_ONE_BUCKET_MIB = 2.0**40  # DDP counts bytes in 64 bits, and knows no infinity
# Buffers are sent once a step instead: see sync_buffers. torch 2.13 renamed the option, and warns
# about the old name.
_NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}


def replicate(
    module: nn.Module,
    device: torch.device,
    averaging: Averaging | None = None,
    *,
    bucket_mib: float | None = None,
) -> DistributedDataParallel:
    """Wrap ``module`` so that its gradients are averaged over all ranks during backward.

    By ``averaging``, where it is given, else by DDP's own all-reduces; in buckets of
    ``bucket_mib``, else of DDP's own 25 MiB. The ranks must hold the same parameters.

    ``find_unused_parameters`` is always on, for two reasons beyond unused parameters themselves.
    Without it DDP lays its buckets out anew after the first backward; a sum over three or more
    ranks depends in its last bit on where a gradient lies in its bucket, so a resumed run would
    drift from the one that was never interrupted. And it lets a rank without samples take part in
    a step without running the model. The cost is a walk over the graph (benchmarks/overhead.py).
    """
    _use_up_the_notice(device)
    wrapped = _wrap(module, device, bucket_mib)
    if averaging is not None:
        # A lambda, since torch insists on certain annotations where there are any.
        wrapped.register_comm_hook(None, lambda state, bucket: averaging.hook(bucket))
    return wrapped


def _wrap(
    module: nn.Module, device: torch.device, bucket_mib: float | None = None
) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(
        module,
        bucket_cap_mb=None if bucket_mib is None else min(bucket_mib, _ONE_BUCKET_MIB),
        init_sync=False,  # they start from rank 0's values, whatever the layout
        device_ids=[device.index] if device.type == "cuda" else None,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
        **_NO_BUFFER_SYNC,
    )
    free_reducer_before_group(wrapped)
    return wrapped


def _use_up_the_notice(device: torch.device) -> None:
    """Spend DDP's once-a-process remark that no parameter was unused on a module of our own.

    It is written to standard error by C++ code, past Python's warnings, and for us it tells of
    the usual case. Anything else that is written meanwhile is passed on. Done every time, since
    it takes all ranks and they need not be equally old.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as caught:
        stderr = os.dup(2)
        try:
            os.dup2(caught.fileno(), 2)
            _wrap(nn.Linear(1, 1).to(device), device)(torch.ones(1, 1, device=device))
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        caught.seek(0)
        for line in caught:
            if b"find_unused_parameters=True was specified" not in line:
                os.write(2, line)


@torch.no_grad()
def sync_buffers(model: nn.Module, group: Group) -> None:
    """Give the ranks of ``group`` its first one's persistent floating-point buffers.

    Running statistics, for example, which each rank updates from its own samples.

    One flat broadcast a dtype, where DDP would send buffer by buffer, constants included.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in _persistent_buffers(model):
        if buffer.is_floating_point() and buffer.numel():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        flat = torch.cat([buffer.flatten() for buffer in buffers])
        dist.broadcast(flat, src=group.ranks[0], group=group.process_group)
        parts = flat.split([buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))


def _persistent_buffers(model: nn.Module) -> list[torch.Tensor]:
    if next(model.buffers(), None) is None:  # most models: spare them a state_dict a step
        return []
    saved = model.state_dict(keep_vars=True)
    return [
        buffer
        for name, buffer in model.named_buffers()
        if name in saved and not buffer.is_meta  # those of another pipeline stage are not here
    ]
