"""How often an ordinary DDP script hangs at its end, and how often with paceline.ddp_teardown.

    python benchmarks/ddp_end.py [--runs 150]

Each run forks two ranks that train a few steps over Gloo, destroy their process group, and drop the
model. The more else the machine has to do, the more often the race is lost that this is about.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import time

import torch
import torch._dynamo  # which optimizers import on first use: once here, not in every rank
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.ddp_teardown import free_reducer_before_group

SECONDS = 20.0


def main() -> None:
    """Print a line for each way of ending."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=150)
    runs = parser.parse_args().runs
    torch.set_num_threads(1)
    for in_order in (False, True):
        hung = sum(not run(in_order) for _ in range(runs))
        name = "reducer before group" if in_order else "as torch does it"
        print(f"{name}: {hung} of {runs} runs hung", flush=True)


def run(in_order: bool) -> bool:
    """Whether both ranks ended by themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = set()
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            train(rank, port, in_order)
            os._exit(0)
        ranks.add(pid)
    deadline = time.monotonic() + SECONDS
    while ranks and time.monotonic() < deadline:
        ranks -= {pid for pid in ranks if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.005)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return not ranks


def train(rank: int, port: int, in_order: bool) -> None:
    """What a script does: the model is dropped when the function ends."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Linear(4, 1))
    if in_order:
        free_reducer_before_group(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        x = torch.randn(32, 4)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
