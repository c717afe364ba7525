"""Plain PyTorch under torchrun: DDP, and ``torch.save`` after every few steps."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from recovering import task


def main() -> None:
    """Train until killed; go on from the last file."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(task.make_model())
    optimizer = task.make_optimizer(model)
    file = Path(task.folder()) / "last.pt"
    start = 0
    if file.exists():
        state = torch.load(file, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    data = task.Tokens()
    share = task.GLOBAL_BATCH // size
    for step in range(start, task.STEPS):
        first = step * task.GLOBAL_BATCH + rank * share
        rows = [data[index % len(data)] for index in range(first, first + share)]
        batch = [torch.stack(column) for column in zip(*rows, strict=True)]
        optimizer.zero_grad()
        task.loss_of(model, batch).backward()
        optimizer.step()
        if (step + 1) % task.every() == 0 and rank == 0:
            part = file.with_suffix(".part")
            torch.save(
                {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step + 1,
                },
                part,
            )
            os.replace(part, file)


if __name__ == "__main__":
    main()
