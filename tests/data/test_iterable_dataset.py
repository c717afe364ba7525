"""Iterable datasets: every rank reads the same stream and keeps its share."""

import gc
import io
import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from paceline.data import Loader, loader
from paceline.errors import DataError


@pytest.fixture(autouse=True)
def _no_worker_is_left_behind():
    yield
    gc.collect()
    assert multiprocessing.active_children() == []


class Counting(IterableDataset[Any]):
    def __init__(self, n: int = 10) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        yield from range(self.n)


class Shuffling(IterableDataset[Any]):
    """A shuffle of its own, and noise, from every process-wide generator."""

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(10).tolist():
            noise = [random.random(), np.random.rand(), torch.rand(()).item()]
            yield torch.tensor([index, *noise], dtype=torch.float64)


class Stateful(Shuffling):
    """Saves itself; counts what it gives, so that skipping shows."""

    def __init__(self) -> None:
        self.at = 0
        self.order: list[int] = []
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        if self.at == 0:
            self.order = torch.randperm(10).tolist()
        while self.at < 10:
            self.at += 1
            self.given += 1
            yield torch.tensor([self.order[self.at - 1], random.random(), np.random.rand()])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.order = state["at"], state["order"]


class EpochAware(IterableDataset[Any]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter([100 * self.epoch + at for at in range(5)])


def world(dataset: Any, size: int, **options: Any) -> list[Loader]:
    options = {"global_batch": 4, **options}
    return [loader(dataset(), rank=rank, size=size, **options) for rank in range(size)]


def epoch(loaders: list[Loader]) -> list[torch.Tensor]:
    """The global batch of each step of an epoch."""
    return [torch.cat(parts) for parts in zip(*loaders, strict=True)]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dataset", [Counting, Shuffling, Stateful])
@pytest.mark.parametrize("workers", [0, 1])
def test_every_world_sees_the_same_stream(dataset: Any, workers: int) -> None:
    alone = world(dataset, 1)
    expected = [epoch(alone), epoch(alone)]
    torch.manual_seed(9)
    three = world(dataset, 3, workers=workers)
    assert equal(epoch(three), expected[0])
    assert equal(epoch(three), expected[1])
    assert [one.position for one in three] == [20] * 3
    assert [one.epoch for one in three] == [2] * 3
    assert [len(batch) for batch in expected[0]] == [4, 4, 2]


@pytest.mark.parametrize("dataset", [Shuffling, Stateful])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("taken", [0, 1, 3, 4])
def test_resume_in_another_world(dataset: Any, workers: int, taken: int) -> None:
    alone = world(dataset, 1)
    expected = [*epoch(alone), *epoch(alone)]
    first = world(dataset, 2, workers=workers)
    iterators = [iter(one) for one in first]
    for step in range(taken):
        if step == 3:
            iterators = [_next_epoch(one, old) for one, old in zip(first, iterators, strict=True)]
        for iterator in iterators:
            next(iterator)
    states = io.BytesIO()
    torch.save(first[0].state_dict(), states)
    states.seek(0)
    second = world(dataset, 3)
    for one in second:
        one.load_state_dict(torch.load(states, weights_only=True))
        states.seek(0)
    end = 6 if taken >= 3 else 3
    assert equal(epoch(second), expected[taken:end])
    assert second[0].position == (20 if taken >= 3 else 10)
    for iterator in iterators:
        iterator.close()


def _next_epoch(one: Loader, old: Iterator[Any]) -> Iterator[Any]:
    with pytest.raises(StopIteration):
        next(old)
    return iter(one)


@pytest.mark.parametrize("dataset", [Counting, Shuffling, Stateful])
@pytest.mark.parametrize("workers", [0, 1])
def test_resume_where_the_last_batch_was_whole(dataset: Any, workers: int) -> None:
    """Nobody has seen yet that the epoch is over; the next batch is of the next one anyway."""
    alone = world(dataset, 1, global_batch=5)
    expected = [epoch(alone), epoch(alone)]
    (first,) = world(dataset, 1, global_batch=5, workers=workers)
    iterator = iter(first)
    next(iterator)
    next(iterator)
    state = first.state_dict()
    iterator.close()
    (second,) = world(dataset, 1, global_batch=5)
    second.load_state_dict(state)
    assert equal(epoch([second]), expected[1])
    assert (second.position, second.epoch) == (20, 2)


def test_a_stream_that_saves_itself_is_not_read_again() -> None:
    saved = Stateful()
    first = loader(saved, global_batch=4, rank=0, size=1)
    for _ in first:
        break
    resumed = Stateful()
    second = loader(resumed, global_batch=4, rank=0, size=1)
    second.load_state_dict(first.state_dict())
    next(iter(second))
    assert (saved.given, resumed.given) == (4, 4)


@pytest.mark.parametrize("dataset", [Counting, Shuffling, Stateful])
@pytest.mark.parametrize("workers", [0, 1])
def test_break_goes_on_with_the_next_batch(dataset: Any, workers: int) -> None:
    expected = epoch(world(dataset, 1))
    (data,) = world(dataset, 1, workers=workers)
    batches = []
    for batch in data:
        batches.append(batch)
        break
    assert data.position == 4
    assert equal([*batches, *data], expected)
    for _ in data:
        break
    data.seek(0)  # back to the start, though the dataset stands in the middle
    assert equal(list(data), expected)


def test_seek_reads_up_to_the_position() -> None:
    (data,) = world(Counting, 1)
    data.seek(6)
    assert [batch.tolist() for batch in data] == [[6, 7, 8, 9]]
    data.seek(11)
    with pytest.raises(DataError) as caught:
        list(data)
    assert str(caught.value) == (
        "the stream ended after 10 samples of epoch 0, before offset 11: it is not the stream this "
        "position was saved with, or the position lies in a later epoch (load_state_dict knows the "
        "epoch, seek does not)."
    )


def test_a_stream_may_know_its_length_and_its_epoch() -> None:
    class Sized(EpochAware):
        def __len__(self) -> int:
            return 5

    (data,) = world(Sized, 1, global_batch=2)
    assert (data.samples_per_epoch, data.steps_per_epoch, len(data)) == (5, 3, 3)
    data.seek(7)
    assert [batch.tolist() for batch in data] == [[102, 103], [104]]
    (unsized,) = world(EpochAware, 1, global_batch=2)
    assert (unsized.samples_per_epoch, unsized.steps_per_epoch) == (None, None)
    assert [batch.tolist() for batch in unsized] == [[0, 1], [2, 3], [4]]
    with pytest.raises(TypeError, match="reads a stream without a length"):
        len(unsized)


def test_drop_last_and_empty_shares() -> None:
    (data,) = world(Counting, 1, drop_last=True)
    assert [len(batch) for batch in data] == [4, 4]
    assert data.epoch == 1
    loaders = world(Shuffling, 3, global_batch=2)
    assert [[len(part) for part in parts] for parts in zip(*loaders, strict=True)] == [
        [1, 1, 0]
    ] * 5


def test_a_stream_leaves_the_models_generators_alone() -> None:
    torch.manual_seed(0)
    random.seed(0)
    expected = [(torch.rand(()).item(), random.random()) for _ in range(3)]
    torch.manual_seed(0)
    random.seed(0)
    (data,) = world(Shuffling, 1)
    assert [(torch.rand(()).item(), random.random()) for _ in data] == expected


def test_a_random_collate_function_does_not_move_the_stream() -> None:
    """It runs on shares of other sizes on each rank, so it may not touch what all ranks share."""

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        torch.rand(len(samples))
        return torch.stack(samples)

    assert equal(epoch(world(Shuffling, 3, collate_fn=collate)), epoch(world(Shuffling, 1)))


def test_an_object_that_can_only_be_iterated_is_a_stream() -> None:
    class Letters:
        def __iter__(self) -> Iterator[int]:
            return iter([1, 2, 3])

    assert [batch.tolist() for batch in loader(Letters(), global_batch=2, rank=0, size=1)] == [
        [1, 2],
        [3],
    ]


def test_an_empty_stream_says_so() -> None:
    data = loader(Counting(0), global_batch=4, rank=0, size=1)
    with pytest.raises(DataError) as caught:
        list(data)
    assert str(caught.value) == (
        "epoch 0 gave no batch: the dataset is empty, its iterator can be used only once, or "
        "drop_last dropped a first batch that was short of global_batch=4."
    )


def test_an_error_in_the_worker_of_a_stream_reaches_the_loop() -> None:
    class Broken(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from range(4)
            raise OSError("the socket closed")

    data = loader(Broken(), global_batch=2, workers=1, rank=0, size=1)
    seen = []
    with pytest.raises(OSError, match="the socket closed"):
        seen.extend(batch.tolist() for batch in data)
    assert seen == [[0, 1], [2, 3]]
    assert data.position == 4
    assert multiprocessing.active_children() == []
