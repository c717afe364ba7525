"""Data parallelism: a copy of the model on every rank, gradients averaged by torch's DDP."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def replicate(module: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Wrap ``module`` so that its gradients are averaged over all ranks during backward.

    ``find_unused_parameters`` is always on, for two reasons beyond unused parameters themselves.
    Without it DDP lays its buckets out anew after the first backward; a sum over three or more
    ranks depends in its last bit on where a gradient lies in its bucket, so a resumed run would
    drift from the one that was never interrupted. And it lets a rank without samples take part in
    a step without running the model. The cost is a walk over the graph (benchmarks/overhead.py).
    """
    # DDP remarks at the first step that no parameter was unused: for us that is the usual case.
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    return DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,  # the engine does so once a step: see sync_buffers
    )


@torch.no_grad()
def sync_buffers(model: nn.Module) -> None:
    """Give every rank rank 0's persistent floating-point buffers, such as running statistics.

    One flat broadcast a dtype, where DDP would send buffer by buffer, constants included.
    """
    saved = model.state_dict(keep_vars=True)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point() and buffer.numel():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        flat = torch.cat([buffer.flatten() for buffer in buffers])
        dist.broadcast(flat, src=0)
        parts = flat.split([buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))
