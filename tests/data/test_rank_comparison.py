"""Ranks compare what they draw: data lost or repeated is an error on all of them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    random_split,
)

from paceline.data import loader
from paceline.errors import DataError
from paceline.world import World, collectives

pytestmark = pytest.mark.world(2)


class Stream(IterableDataset[Any]):
    """Samples 0 to ``n``, through ``change(stream, epoch)`` on the indices."""

    def __init__(self, n: int, change: Callable[[list[int], int], Any] | None = None) -> None:
        self.n, self.change, self.epoch = n, change, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        indices = list(range(self.n))
        made = indices if self.change is None else self.change(indices, self.epoch)
        return iter([torch.tensor([float(i), 1.0]) if isinstance(i, int) else i for i in made])


def own_rank() -> int:
    return int(os.environ["RANK"])


def read_all(data: Any, epochs: int = 1) -> tuple[str, int]:
    """What the ranks raised, and how many batches this one was given before that."""
    batches = 0
    try:
        for _ in range(epochs):
            for _ in data:
                batches += 1
    except DataError as error:
        return str(error), batches
    return "", batches


def by_rank(indices: list[int], epoch: int) -> list[int]:
    return indices[own_rank() :: 2]


def unseeded(indices: list[int], epoch: int) -> list[int]:
    random.Random(own_rank()).shuffle(indices)
    return indices


def late(indices: list[int], epoch: int) -> list[int]:
    return unseeded(indices, epoch) if epoch == 2 else indices


def shorter(indices: list[int], epoch: int) -> list[int]:
    return indices[: len(indices) - 8 * own_rank()]


def few_fewer(indices: list[int], epoch: int) -> list[Any]:
    return [torch.zeros(2)] * (len(indices) - 2 * own_rank())


WRONG_STREAMS = {
    "picks shards by rank": (by_rank, 1, 1, "sample 0 is"),
    "shuffles without a seed": (unseeded, 1, 1, "sample 0 is"),
    "differs in its third epoch": (late, 3, 8, "epoch 2"),
    "ends at different lengths": (
        shorter,
        1,
        3,
        "the epoch is not over yet on rank 0; over after 3 batches on rank 1",
    ),
    "ends within a batch": (few_fewer, 1, 3, "the number of samples so far is 32 on rank 0"),
}


@pytest.mark.parametrize("case", WRONG_STREAMS)
@pytest.mark.parametrize("workers", [0, 1])
def test_streams_that_differ_between_ranks(ranks: Any, case: str, workers: int) -> None:
    change, epochs, most, words = WRONG_STREAMS[case]

    def job() -> tuple[str, int]:
        with loader(Stream(32, change), global_batch=8, workers=workers) as data:
            return read_all(data, epochs)

    for message, batches in ranks(job):
        assert "ranks do not read the same data" in message
        assert words in message
        assert "sharded_by_rank=True" in message
        assert batches <= most


class Seeded(Sampler[int]):
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(200, generator=self.generator).tolist())

    def __len__(self) -> int:
        return 200


def test_a_sampler_seeded_for_each_process(ranks: Any) -> None:
    def job() -> tuple[str, int]:
        data = DataLoader(range(200), batch_size=20, sampler=Seeded(own_rank()))
        return read_all(loader(data))

    for message, batches in ranks(job):
        assert "the sampler's batch of indices is" in message
        assert "seed its own generator alike on all ranks" in message
        assert batches == 1


def test_a_sampler_that_is_the_same_on_all_ranks(ranks: Any) -> None:
    def job() -> tuple[str, int]:
        torch.manual_seed(own_rank())  # not the sampler's affair
        own = DataLoader(range(200), batch_size=20, sampler=Seeded(1))
        drawn = RandomSampler(range(200), replacement=True, num_samples=100)
        plain = DataLoader(range(200), batch_size=20, sampler=drawn)
        return read_all(loader(own), 2)[0] + read_all(loader(plain), 2)[0], 0

    assert ranks(job) == [("", 0)] * 2


def shuffled_files() -> Any:
    files = [f"/data/{index}.png" for index in range(50)]
    random.Random(own_rank()).shuffle(files)
    return files


def split_without_seed() -> Any:
    data = TensorDataset(torch.arange(100.0))
    generator = torch.Generator().manual_seed(own_rank())
    return random_split(data, [60, 40], generator=generator)[0]


WRONG_DATASETS = {
    "shuffled file list": (shuffled_files, ".png on rank 0"),
    "random_split without a seed": (split_without_seed, "[0] is"),
    "random data without a seed": (
        lambda: TensorDataset(
            torch.randn(40, 3, generator=torch.Generator().manual_seed(own_rank()))
        ),
        "float32 (3,)",
    ),
    "a part by rank": (lambda: Subset(range(40), range(own_rank(), 40, 2)), "sample "),
    "another length": (
        lambda: list(range(40 + own_rank())),
        "the number of samples is 40 on rank 0; 41 on rank 1",
    ),
}


@pytest.mark.parametrize("case", WRONG_DATASETS)
def test_datasets_that_differ_between_ranks(ranks: Any, case: str) -> None:
    make, words = WRONG_DATASETS[case]

    def job() -> tuple[str, int]:
        return read_all(loader(make(), global_batch=8))

    for message, batches in ranks(job):
        assert "ranks do not read the same data" in message
        assert words in message
        assert "by a fixed seed" in message
        assert batches == 1


class Augmented(torch.utils.data.Dataset[Any]):
    """Samples of many kinds that are random, each in its own way."""

    def __init__(self) -> None:
        self.own = random.Random(own_rank())

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return {
            "image": torch.rand(3, 8) * self.own.random(),
            "flipped": torch.ones(4) * (self.own.random() > 0.5),
            "boxes": [torch.rand(4) for _ in range(self.own.randrange(1, 4))],
            "label": index % 7,
            "path": f"/scratch/node{own_rank()}/{index}.png",
            "object": object(),
        }


class AugmentedStream(IterableDataset[Any]):
    def __init__(self, label: bool) -> None:
        self.label = label

    def __iter__(self) -> Iterator[Any]:
        own = random.Random()
        for index in range(40):
            image = torch.rand(3) * own.random()
            yield (image, index) if self.label else image


def test_random_augmentation_is_no_difference(ranks: Any) -> None:
    def job() -> list[tuple[str, int]]:
        return [
            read_all(loader(Augmented(), global_batch=8, collate_fn=lambda samples: samples), 2),
            read_all(loader(AugmentedStream(label=True), global_batch=8), 2),
        ]

    for found in ranks(job):
        assert found == [("", 10), ("", 10)]


class Reshuffled(IterableDataset[Any]):
    """In an order of its own each time; a part of each sample is the same in all."""

    def __iter__(self) -> Iterator[Any]:
        order = random.Random().sample(range(40), 40)
        return iter([{"x": float(index), "weight": 1.0, "tags": ["a", "b"]} for index in order])


def test_what_all_samples_have_in_common_tells_nothing(ranks: Any) -> None:
    for message, batches in ranks(lambda: read_all(loader(Reshuffled(), global_batch=8))):
        assert "random generator of its own" in message
        assert batches == 1


def test_a_stream_of_nothing_but_random_samples_is_refused_unless_said(ranks: Any) -> None:
    def job() -> list[tuple[str, int]]:
        stream = AugmentedStream(label=False)
        return [
            read_all(loader(stream, global_batch=8)),
            read_all(loader(stream, global_batch=8, compare=False)),
        ]

    for (message, batches), unchecked in ranks(job):
        assert "random generator of its own" in message
        assert "compare=False" in message
        assert batches == 1
        assert unchecked == ("", 5)


def test_last_digits_of_another_machine_are_no_difference(ranks: Any) -> None:
    def job() -> list[tuple[str, int]]:
        jitter = 1 + 1e-6 * own_rank()
        image = torch.arange(300).remainder(200).to(torch.uint8) + own_rank()
        samples = [(torch.arange(20.0) * jitter * i, image, i) for i in range(40)]
        labels = [torch.tensor(i % 3 + (own_rank() if i > 20 else 0)).byte() for i in range(40)]
        return [
            read_all(loader(samples, global_batch=8)),
            read_all(loader(Stream(40, lambda indices, epoch: samples), global_batch=8), 2),
            read_all(loader(Stream(40, lambda indices, epoch: labels), global_batch=8)),
        ]

    for exact, streamed, labelled in ranks(job):
        assert exact == ("", 5)
        assert streamed == ("", 10)
        assert "ranks do not read the same data" in labelled[0]


def test_places_and_arguments_that_differ(ranks: Any) -> None:
    def job() -> list[str]:
        data = loader(range(40), global_batch=8)
        data.seek(8 * own_rank())
        return [
            read_all(data)[0],
            read_all(loader(range(40), global_batch=8, seed=own_rank()))[0],
            read_all(loader(range(40), global_batch=8 + own_rank()))[0],
        ]

    for place, seed, batch in ranks(job):
        assert "offset is 0 on rank 0; 8 on rank 1" in place
        assert "state_dict" in place
        assert "seed is 0 on rank 0; 1 on rank 1" in seed
        assert "global_batch is 8 on rank 0; 9 on rank 1" in batch


def test_one_rank_may_look_at_a_batch_by_itself(ranks: Any) -> None:
    def job() -> int:
        world = World.current()
        if world.is_main:
            assert len(next(iter(loader(range(40), global_batch=8)))) == 4
        return int(collectives.all_reduce(torch.ones(1)).item())

    assert ranks(job) == [2, 2]


def test_ready_batches_are_compared(ranks: Any) -> None:
    def job() -> tuple[str, int]:
        batches = Stream(
            6, lambda indices, epoch: [torch.randn(8, 2) + i for i in by_rank(indices, 0)]
        )
        return read_all(loader(DataLoader(batches, batch_size=None)))

    for message, batches in ranks(job):
        assert "the batch is float32 (8, 2)" in message
        assert batches == 1
