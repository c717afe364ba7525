"""Existing torch DataLoaders: what they say is kept, and each batch is cut into shares."""

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline.data import Loader, Order, from_dataloader, loader
from paceline.errors import DataError

DATA = list(range(10))


def world(make: Any, size: int, **options: Any) -> list[Loader]:
    return [loader(make(), rank=rank, size=size, **options) for rank in range(size)]


def epoch(loaders: list[Loader]) -> list[list[int]]:
    return [torch.cat(parts).tolist() for parts in zip(*loaders, strict=True)]


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(DATA, batch_size=4, shuffle=True),
        lambda: DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA)),
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, False)),
    ],
)
def test_a_plain_shuffle_becomes_our_order(make: Any) -> None:
    for size in (1, 3):
        loaders = world(make, size, seed=5)
        assert flat(epoch(loaders)) == Order(10, 5).indices(0, 0, 10).tolist()
        assert flat(epoch(loaders)) == Order(10, 5).indices(1, 0, 10).tolist()
        assert loaders[0].global_batch == 4
        loaders[0].seek(10**6)  # at once, as with any dataset
        assert loaders[0].epoch == 10**5


def test_a_sequential_order_stays_and_drop_last_is_kept() -> None:
    def make() -> Any:
        return DataLoader(DATA, batch_size=4, drop_last=True)

    assert epoch(world(make, 3)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    again = DataLoader(DATA, batch_size=4)
    assert epoch([loader(again, rank=0, size=1, global_batch=4, shuffle=False)])[2] == [8, 9]
    with pytest.warns(DeprecationWarning, match="from_dataloader is called paceline.loader now"):
        assert epoch([from_dataloader(again, rank=0, size=1)])[2] == [8, 9]


def test_workers_collate_fn_and_their_options_are_kept() -> None:
    def make() -> Any:
        return DataLoader(DATA, batch_size=4, num_workers=1, prefetch_factor=3, collate_fn=tuple)

    with loader(make(), rank=0, size=1) as data:
        assert list(data) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
        assert len(multiprocessing.active_children()) == 1
    with loader(make(), workers=0, rank=0, size=1) as data:
        next(iter(data))
        assert multiprocessing.active_children() == []


class OddThenEven(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield from DATA[1::2]
        yield from DATA[::2]


class Buckets:
    """A batch sampler that is no torch class, with batches of its own sizes."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        yield [self.epoch]
        yield [1, 2, 3]
        yield [4, 5]


def test_a_custom_sampler_is_iterated_as_it_is() -> None:
    def make() -> Any:
        return DataLoader(DATA, batch_size=4, sampler=OddThenEven())

    for size in (1, 3):
        loaders = world(make, size)
        assert epoch(loaders) == [[1, 3, 5, 7], [9, 0, 2, 4], [6, 8]]
        assert (loaders[0].steps_per_epoch, loaders[0].samples_per_epoch) == (None, None)


def test_a_custom_batch_sampler_is_iterated_as_it_is() -> None:
    for size in (1, 2):
        loaders = world(lambda: DataLoader(DATA, batch_sampler=Buckets()), size)
        assert epoch(loaders) == [[0], [1, 2, 3], [4, 5]]
        assert epoch(loaders) == [[1], [1, 2, 3], [4, 5]]
        assert [one.position for one in loaders] == [12] * size
        assert loaders[0].global_batch is None
        resumed = world(lambda: DataLoader(DATA, batch_sampler=Buckets()), 3)
        next(iter(loaders[0]))
        for one in resumed:
            one.load_state_dict(loaders[0].state_dict())
        assert epoch(resumed) == [[1, 2, 3], [4, 5]]


WEIGHTS = [1.0] * 10


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: WeightedRandomSampler(WEIGHTS, 11),
        lambda: SubsetRandomSampler(range(9)),
        lambda: RandomSampler(DATA, replacement=True, num_samples=11),
        lambda: WeightedRandomSampler(WEIGHTS, 11, generator=torch.Generator().manual_seed(3)),
        lambda: SubsetRandomSampler(range(9), generator=torch.Generator().manual_seed(3)),
    ],
)
def test_random_samplers_agree_on_all_ranks_and_resume(sampler: Any) -> None:
    def make() -> Any:
        torch.manual_seed(torch.seed())  # each rank's own generator stands somewhere else
        return DataLoader(DATA, batch_size=4, sampler=sampler())

    alone = world(make, 1)
    expected = [epoch(alone), epoch(alone), epoch(alone)]
    assert expected[0] != expected[1] != expected[2]
    three = world(make, 3)
    assert [epoch(three), epoch(three)] == expected[:2]
    for one in three:
        next(iter(one))
    two = world(make, 2)
    for one in two:
        one.load_state_dict(three[0].state_dict())
    assert epoch(two) == expected[2][1:]
    assert epoch(three) == expected[2][1:]  # and after the break, in the same loader
    two[0].seek(0)
    assert epoch(two[:1])[0][:2] == expected[0][0][:2]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(10).tolist())


class ReadyBatches(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in (0, 4, 8):
            x = torch.arange(start, min(start + 4, 10))
            yield {"x": x, "names": [f"sample {i}" for i in x.tolist()]}


def test_a_dataloader_over_a_stream() -> None:
    def make() -> Any:
        return DataLoader(Stream(), batch_size=4, num_workers=1)

    alone = world(make, 1)
    expected = epoch(alone)
    assert sorted(flat(expected)) == DATA
    assert epoch(world(make, 3)) == expected
    assert epoch(alone) != expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(ReadyBatches(), batch_size=None),
        lambda: DataLoader(ReadyBatches(), batch_size=None, num_workers=1),
    ],
)
def test_ready_made_batches_are_cut(make: Any) -> None:
    for size in (1, 3, 5):
        loaders = world(make, size)
        parts = list(zip(*loaders, strict=True))
        assert [flat([part["x"].tolist() for part in step]) for step in parts] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [8, 9],
        ]
        assert flat([part["names"] for part in parts[2]]) == ["sample 8", "sample 9"]
        loaders[0].seek(8)
        assert next(iter(loaders[0]))["x"].tolist() == ([8, 9] if size == 1 else [8])


def test_ready_made_batches_by_index() -> None:
    """The pattern of torch's documentation: a batch sampler as the sampler, batch_size=None."""
    tensor = torch.arange(100, 110)
    sampler = BatchSampler(SequentialSampler(tensor), 4, False)
    loaders = world(lambda: DataLoader(tensor, batch_size=None, sampler=sampler), 3)
    assert flat(epoch(loaders)) == tensor.tolist()
    assert len(loaders[0]) == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: loader(DataLoader(DATA, batch_size=4), global_batch=8, rank=0, size=1),
            "global_batch=8 does not agree with the DataLoader's batch_size=4. Leave global_batch "
            "out, or make the DataLoader with batch_size=8.",
        ),
        (
            lambda: loader(DataLoader(DATA, batch_size=4), drop_last=True, rank=0, size=1),
            "drop_last=True does not agree with the DataLoader's drop_last=False. Leave drop_last "
            "out, or make the DataLoader with drop_last=True.",
        ),
        (
            lambda: loader(DataLoader(DATA, batch_size=4), shuffle=True, rank=0, size=1),
            "shuffle=True does not agree with the DataLoader's shuffle=False. Leave shuffle out, "
            "or make the DataLoader with shuffle=True.",
        ),
        (
            lambda: loader(DataLoader(DATA), collate_fn=tuple, rank=0, size=1),
            "collate_fn=tuple does not agree with the DataLoader's collate_fn=default_collate. "
            "Leave collate_fn out, or make the DataLoader with collate_fn=tuple.",
        ),
        (
            lambda: loader(DataLoader(DATA, sampler=OddThenEven()), shuffle=True, rank=0, size=1),
            "shuffle=True: the DataLoader's own OddThenEven decides the order. Leave shuffle out.",
        ),
        (
            lambda: loader(
                DataLoader(DATA, sampler=DistributedSampler(DATA, num_replicas=2, rank=0)),
                rank=0,
                size=2,
            ),
            "the DataLoader has a DistributedSampler, which gives each rank other samples; "
            "Paceline cuts each global batch itself. Make the DataLoader with shuffle=True and the "
            "global batch as its batch_size, or pass per_device_batch with that of one rank.",
        ),
        (
            lambda: loader(DataLoader(Stream(), num_workers=2), rank=0, size=1),
            "workers=2: each worker would read its own copy of the stream, and the order would "
            "depend on how many there are. A stream may have 0 workers or 1; prefetch inside the "
            "dataset, or use a dataset with __getitem__ and __len__.",
        ),
        (
            lambda: loader(DataLoader(ReadyBatches(), batch_size=None), workers=1, rank=0, size=1),
            "workers=1 does not agree with the DataLoader's num_workers=0. Leave workers out, or "
            "make the DataLoader with num_workers=1.",
        ),
        (
            lambda: loader(DataLoader(DATA, batch_size=4), global_batch=0, rank=0, size=1),
            "global_batch=0 must be a whole number, 1 or more: it is the number of samples a step "
            "takes over all ranks.",
        ),
        (
            lambda: loader(DataLoader([], batch_size=4), rank=0, size=1),
            "the dataset (list) is empty: there is no sample.",
        ),
    ],
)
def test_wrong_calls(call: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        call()
    assert str(caught.value) == message


def test_positions_inside_a_samplers_batch() -> None:
    data = loader(DataLoader(DATA, batch_sampler=Buckets()), rank=0, size=1)
    data.seek(2)
    with pytest.raises(DataError, match=r"^position 2 falls inside a batch that the DataLoader's"):
        list(data)
    data.seek(7)
    with pytest.raises(DataError, match=r"^the DataLoader's sampler ended 1 samples before offset"):
        list(data)
    ready = loader(DataLoader(ReadyBatches(), batch_size=None), rank=0, size=1)
    ready.seek(5)
    with pytest.raises(DataError, match=r"^position 5 falls inside a batch of 4 that the dataset"):
        list(ready)


def test_an_empty_batch_of_a_batch_sampler_is_refused() -> None:
    data = loader(DataLoader(DATA, batch_sampler=[[1], [], [2]]), rank=0, size=1)
    with pytest.raises(DataError, match="gave an empty batch: a batch must name at least one"):
        list(data)
