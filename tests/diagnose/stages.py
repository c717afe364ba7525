"""A program that gets stuck in several ways, one after the other, until it is let go each time.

Run on two ranks by test_watch.py with a folder; a file named after the stage lets it go on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import paceline

FOLDER = Path(sys.argv[1])


def wait_for(stage: str) -> None:
    while not (FOLDER / stage).exists():
        time.sleep(0.05)


class SlowDataset(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        wait_for("data")
        return torch.ones(2)


def code() -> None:
    wait_for("code")


def data() -> None:
    for _ in torch.utils.data.DataLoader(SlowDataset()):
        pass


def pipe() -> None:
    os.mkfifo(FOLDER / "fifo")
    (FOLDER / "fifo").read_text()


def stopped() -> None:
    (FOLDER / "pid").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def native() -> None:
    with open(FOLDER / "lock", "w") as file:
        ctypes.PyDLL(None).flock(file.fileno(), 2)  # keeps the interpreter while it waits


def message(rank: int) -> None:
    if rank == 0:
        dist.recv(torch.zeros(1), 1)
    else:
        wait_for("message")
        dist.send(torch.zeros(1), 0)


def mismatch(rank: int) -> None:
    seen = torch.zeros(1)
    while not seen.item():  # rank 0 looks for both: they must leave together
        dist.all_reduce(torch.ones(8, dtype=torch.int32 if rank else torch.float32))
        time.sleep(0.05)
        seen.fill_((FOLDER / "mismatch").exists())
        dist.broadcast(seen, 0)


def main() -> None:
    list(torch.utils.data.DataLoader(torch.zeros(1)))  # what it imports is no stage of its own
    world = paceline.World.init()
    dist.all_reduce(torch.ones(2))
    for number, stage in enumerate((code, data, pipe, stopped, native)):
        if world.rank == 1:
            stage()
        dist.all_reduce(torch.ones(10 + number))
    message(world.rank)
    dist.barrier()
    mismatch(world.rank)
    world.close()


if __name__ == "__main__":
    main()
