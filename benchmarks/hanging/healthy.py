"""A healthy run with one slow rank: trains a small model for the seconds given, rank 1 dawdling."""

from __future__ import annotations

import random
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import paceline


def main() -> None:
    """Train until the time is over; all ranks agree on that."""
    world = paceline.World.init()
    model = nn.Linear(32, 32)
    engine = paceline.Engine(
        model,
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        layout=f"dp={world.size}",
    )
    end = time.monotonic() + float(sys.argv[1])
    chance = random.Random(0)
    while True:
        if world.rank == 1:
            time.sleep(chance.uniform(0.0, 2.0))
        engine.step((torch.ones(8, 32), torch.zeros(8, 32)))
        going = torch.tensor([float(time.monotonic() < end)])
        dist.broadcast(going, 0)
        if not going.item():
            return


if __name__ == "__main__":
    main()
