"""Streams that each data-parallel rank reads for itself: every sample once, or an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.data import loader
from paceline.errors import DataError
from paceline.layout import Layout
from paceline.world import World, collectives


class Shards(IterableDataset[torch.Tensor]):
    """Samples picked by data-parallel rank; rank 0 has ``extra`` more than the others."""

    def __init__(self, each: int, layout: str = "auto", extra: int = 0, by: str = "dp") -> None:
        self.each, self.layout, self.extra, self.by = each, layout, extra, by

    def __iter__(self) -> Iterator[torch.Tensor]:
        world = World.current()
        layout = Layout.parse(self.layout, world_size=world.size)
        rank = world.rank if self.by == "rank" else layout.coordinate(world.rank).dp
        rank = 0 if self.by == "nothing" else rank
        count = self.each + (self.extra if rank == 0 else 0)
        return iter([torch.tensor([1000 * rank + index]) for index in range(count)])


def everything(data: Any) -> list[tuple[list[list[int]], tuple[int, int]]]:
    """By step: what each rank got, and this rank's share."""
    return [
        (collectives.all_gather_object(batch.flatten().tolist()), data.share[:2]) for batch in data
    ]


def test_every_sample_of_every_stream_once(ranks: Any) -> None:
    def job(workers: int) -> Any:
        data = loader(Shards(4, extra=5), global_batch=4, workers=workers, sharded_by_rank=True)
        with data:
            return [everything(data), everything(data), data.position, data.steps_per_epoch]

    for workers in (0, 1):
        first, second = ranks(job, workers, world_size=2)
        steps = [step for step, _ in first[0]]
        assert steps[:2] == [[[0, 1], [1000, 1001]], [[2, 3], [1002, 1003]]]
        assert steps[2:] == [[[4, 5], []], [[6, 7], []], [[8], []]]
        assert [share for _, share in first[0]] == [(2, 4), (2, 4), (2, 2), (2, 2), (1, 1)]
        assert [share for _, share in second[0]] == [(2, 4), (2, 4), (0, 2), (0, 2), (0, 1)]
        assert first[1] == first[0]  # the next epoch
        assert first[2:] == [26, None]


@pytest.mark.world(2)
def test_resume_reads_each_stream_from_where_it_was(ranks: Any) -> None:
    def job() -> Any:
        def make() -> Any:
            return loader(Shards(3, extra=4), global_batch=4, sharded_by_rank=True)

        whole = [step for step, _ in everything(make())]
        for steps in range(1, len(whole)):
            data = make()
            for step, _ in zip(range(steps), data, strict=False):
                collectives.all_gather_object(step)
            state = data.state_dict()
            again = make()
            again.load_state_dict(state)
            assert [step for step, _ in everything(again)] == whole[steps:], steps
        return state

    first, second = ranks(job)
    assert first == second
    assert first["data_parallel_ranks"] == 2
    with pytest.raises(DataError, match=r"data_parallel_ranks=2, but this loader has .*=1"):
        loader(Shards(3), global_batch=4, sharded_by_rank=True).load_state_dict(first)


def test_ranks_that_share_samples_read_one_stream(ranks: Any) -> None:
    def job(by: str) -> Any:
        layout = "dp=2,tp=2"
        data = loader(Shards(4, layout, by=by), global_batch=4, layout=layout, sharded_by_rank=True)
        try:
            return [step for step, _ in everything(data)]
        except DataError as error:
            return str(error)

    for steps in ranks(job, "dp", world_size=4):
        assert steps[0] == [[0, 1], [0, 1], [1000, 1001], [1000, 1001]]
    for message in ranks(job, "rank", world_size=4):
        assert "ranks 0 and 1 work on the same samples" in message
        assert "pick its shards by the data-parallel rank" in message


@pytest.mark.world(2)
def test_streams_that_are_not_sharded_are_told(ranks: Any) -> None:
    def job() -> str:
        data = loader(Shards(20, by="nothing"), global_batch=4, sharded_by_rank=True)
        with pytest.raises(DataError) as caught:
            everything(data)
        return str(caught.value)

    for message in ranks(job):
        assert "data-parallel ranks 0 and 1 read the same samples" in message
        assert "leave sharded_by_rank out" in message


@pytest.mark.world(2)
def test_a_stream_without_a_sample_is_told(ranks: Any) -> None:
    def job() -> str:
        try:
            everything(loader(Shards(0, extra=2), global_batch=4, sharded_by_rank=True))
        except Exception as error:
            return str(error)
        return ""

    with pytest.raises(Exception, match=r"data-parallel rank 1 of 2 has no sample at all"):
        ranks(lambda: everything(loader(Shards(0, extra=2), global_batch=4, sharded_by_rank=True)))


def test_what_cannot_be_exact_is_refused() -> None:
    with pytest.raises(DataError, match=r"is for streams \(IterableDataset\)"):
        loader(range(8), global_batch=4, sharded_by_rank=True)
    with pytest.raises(DataError, match=r"is for streams \(IterableDataset\)"):
        loader(DataLoader(range(8), sampler=[3, 1]), sharded_by_rank=True)
    with pytest.raises(DataError, match=r"drop_last=True with sharded_by_rank"):
        loader(Shards(3), global_batch=4, drop_last=True, sharded_by_rank=True)
    with pytest.raises(DataError, match=r"rank=0, size=2: .* Leave rank and size out"):
        loader(Shards(3), global_batch=4, rank=0, size=2, sharded_by_rank=True)
    with pytest.raises(DataError, match=r"seek\(4\): with sharded_by_rank a position does not"):
        loader(Shards(3), global_batch=4, sharded_by_rank=True).seek(4)
    with pytest.raises(DataError, match=r"batch_size=None"):
        loader(DataLoader(Shards(3), batch_size=None), sharded_by_rank=True)
    with pytest.raises(DataError, match=r"sharded_by_rank='yes' must be True or False"):
        loader(Shards(3), global_batch=4, sharded_by_rank="yes")
