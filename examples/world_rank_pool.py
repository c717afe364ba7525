"""Try something on several ranks from a plain script: no launcher, no `if __name__` guard."""

import torch

from paceline.errors import RankFailed
from paceline.testing import RankPool
from paceline.world import World, collectives


def ring() -> int:
    """Pass a number around the ranks; each adds its own."""
    world = World.current()
    following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    if world.rank == 0:
        collectives.send(torch.tensor(0), following)
        return int(collectives.recv(previous))
    total = collectives.recv(previous) + world.rank
    collectives.send(total, following)
    return int(total)


def disagree() -> None:
    collectives.all_reduce(torch.zeros(3 + World.current().rank))


with RankPool() as pool:
    for size in (2, 3, 4):
        print(f"{size} ranks: {pool.run(ring, world_size=size)}")
    try:
        pool.run(disagree, world_size=2)
    except RankFailed as failure:
        print(failure.__cause__)
