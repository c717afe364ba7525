import torch
import pytest
from paceline.world import World, collectives

@pytest.mark.world(1, 2, 3)
def test_sum(ranks, world_size):
    def job(x):
        world = World.current()
        assert world.size == x
        return collectives.all_reduce(torch.tensor([float(world.rank)]))
    for r in ranks(job, world_size):
        assert r.item() == sum(range(world_size))
