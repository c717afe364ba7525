"""A loader takes its rank and size from the world it is in."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from paceline.data import Order, loader
from paceline.world import World, collectives


def test_without_a_launcher_it_is_a_world_of_one() -> None:
    data = loader(range(10), global_batch=4, shuffle=False)
    assert [batch.tolist() for batch in data] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.world(2, 3)
def test_real_ranks_share_each_batch(ranks: Any, world_size: int) -> None:
    def job() -> tuple[list[list[int]], int]:
        torch.manual_seed(World.current().rank)
        with loader(range(11), global_batch=4, seed=3, workers=1) as data:
            batches = [
                [index for part in collectives.all_gather_object(batch.tolist()) for index in part]
                for batch in data
            ]
        dataloader = DataLoader(list(range(11)), batch_size=4, shuffle=True)
        shared = [
            [index for part in collectives.all_gather_object(batch.tolist()) for index in part]
            for batch in loader(dataloader, seed=3)
        ]
        assert shared == batches
        return batches, data.position

    expected = Order(11, 3).indices(0, 0, 11).tolist()
    for batches, position in ranks(job):
        assert batches == [expected[:4], expected[4:8], expected[8:]]
        assert position == 11
