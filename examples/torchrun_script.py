"""An ordinary DistributedDataParallel script, with nothing of Paceline in it.

    torchrun --nproc-per-node 2 examples/torchrun_script.py --steps 50
    paceline train --script examples/torchrun_script.py --nproc 2 -- --steps 50

do the same. The second keeps a log per rank, shows only the traceback of the first rank that
fails, and leaves no process running.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=0.1)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")  # the launcher has set RANK, WORLD_SIZE, MASTER_ADDR, …
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr)
    data = torch.Generator().manual_seed(dist.get_rank())  # each rank draws its own samples
    for step in range(1, arguments.steps + 1):
        x = torch.randn(32, 4, generator=data)
        loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
