"""The loader over map-style datasets: the same samples in the same order in every world."""

import itertools
import json
import pickle
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset

from paceline.data import Loader, Order, Share, loader, share
from paceline.data.map_dataset import BatchRequest, Fetcher
from paceline.errors import DataError


def make(n: int, rank: int = 0, size: int = 1, **options: Any) -> Loader:
    options = {"global_batch": 4, **options}
    return loader(range(n), rank=rank, size=size, **options)


def world(n: int, size: int, **options: Any) -> list[Loader]:
    return [make(n, rank, size, **options) for rank in range(size)]


def steps(loaders: list[Loader]) -> list[list[int]]:
    """One epoch: the global batch of each step, put together from the shares of the ranks."""
    return [
        [index for part in parts for index in part.tolist()] for parts in zip(*loaders, strict=True)
    ]


def test_shares_are_near_equal() -> None:
    assert [share(7, rank, 3) for rank in range(3)] == [(0, 3), (3, 5), (5, 7)]
    assert [share(2, rank, 3) for rank in range(3)] == [(0, 1), (1, 2), (2, 2)]
    assert share(0, 4, 5) == (0, 0)


@given(total=st.integers(0, 10**6), size=st.integers(1, 50))
def test_shares_cover_everything_once(total: int, size: int) -> None:
    slices = [share(total, rank, size) for rank in range(size)]
    assert slices[0][0] == 0
    assert slices[-1][1] == total
    assert all(a[1] == b[0] for a, b in itertools.pairwise(slices))
    lengths = [stop - start for start, stop in slices]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 60),
    seed=st.integers(0, 10**6),
    size=st.integers(1, 6),
    global_batch=st.integers(1, 70),
    shuffle=st.booleans(),
)
def test_every_world_sees_the_order_of_one_process(
    n: int, seed: int, size: int, global_batch: int, shuffle: bool
) -> None:
    loaders = world(n, size, global_batch=global_batch, seed=seed, shuffle=shuffle)
    order = Order(n, seed, shuffle)
    for epoch in range(2):
        batches = steps(loaders)
        indices = [index for batch in batches for index in batch]
        assert indices == order.indices(epoch, 0, n).tolist()
        assert sorted(indices) == list(range(n))
        assert len(batches) == len(loaders[0]) == -(-n // global_batch)
        assert [len(batch) for batch in batches[:-1]] == [global_batch] * (len(batches) - 1)
    assert {one.position for one in loaders} == {2 * n}


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 60), drop_last=st.booleans(), data=st.data())
def test_another_world_goes_on_where_the_first_stopped(
    n: int, drop_last: bool, data: st.DataObject
) -> None:
    """Other size, other global batch, any position: the next sample is the next sample."""
    batches = st.integers(1, n) if drop_last else st.integers(1, 70)
    sizes = st.integers(1, 5)
    options = {"seed": data.draw(st.integers(0, 99)), "drop_last": drop_last}
    first = world(n, data.draw(sizes), global_batch=data.draw(batches), **options)
    taken = data.draw(st.integers(0, len(first[0])))
    seen: list[int] = []
    for _, parts in zip(range(taken), zip(*first, strict=True), strict=False):
        seen += [index for part in parts for index in part.tolist()]
    states = [one.state_dict() for one in first]
    assert all(state == states[0] for state in states)
    state = json.loads(json.dumps(states[0]))

    second = world(n, data.draw(sizes), global_batch=data.draw(batches), **options)
    for one in second:
        one.load_state_dict(state)
    if drop_last and n - state["position"] % n < second[0].global_batch:
        assert second[0].position == (state["position"] // n + 1) * n  # the rest is dropped
        return
    assert second[0].position == state["position"]
    rest = [index for batch in steps(second) for index in batch]
    order = Order(n, options["seed"])
    epoch, offset = divmod(state["position"], n)
    assert rest == order.indices(epoch, offset, offset + len(rest)).tolist()
    if not drop_last:
        assert len(rest) == n - offset
        assert sorted([*seen, *rest] if epoch == 0 else rest) == list(range(n))


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 50), global_batch=st.integers(1, 20), data=st.data())
def test_seek_is_the_same_as_running_there(n: int, global_batch: int, data: st.DataObject) -> None:
    ran = make(n, global_batch=global_batch)
    straight = [ran.position]
    batches = []
    for _ in range(2):
        for batch in ran:
            batches.append(batch.tolist())
            straight.append(ran.position)
    at = data.draw(st.integers(0, len(batches) - 1))
    jumped = make(n, global_batch=global_batch)
    jumped.seek(straight[at])
    assert next(iter(jumped)).tolist() == batches[at]
    assert jumped.position == straight[at + 1]


def test_position_epoch_and_share_count_what_was_delivered() -> None:
    data = make(10, rank=2, size=3)
    assert (data.position, data.epoch, data.samples_per_epoch, data.steps_per_epoch) == (
        0,
        0,
        10,
        3,
    )
    seen = [(data.position, data.epoch, data.share) for _ in data]
    assert seen == [(4, 0, Share(1, 4, 0)), (8, 0, Share(1, 4, 0)), (10, 1, Share(0, 2, 0))]
    next(iter(data))
    assert (data.position, data.epoch, data.share) == (14, 1, Share(1, 4, 1))


def test_break_keeps_the_position_and_the_next_loop_goes_on() -> None:
    data = make(10, shuffle=False)
    for batch in data:
        assert batch.tolist() == [0, 1, 2, 3]
        break
    assert data.position == 4
    assert [batch.tolist() for batch in data] == [[4, 5, 6, 7], [8, 9]]
    assert data.position == 10


def test_an_error_in_the_loop_keeps_the_position() -> None:
    data = make(10)

    def loop() -> None:
        for _ in data:
            raise RuntimeError("my own")

    with pytest.raises(RuntimeError, match="my own"):
        loop()
    assert data.position == 4


def test_drop_last() -> None:
    data = make(10, drop_last=True, shuffle=False)
    assert [batch.tolist() for batch in data] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(data) == 2
    assert data.position == 10  # the two left out are over with
    data.seek(17)  # three samples are left of the epoch: less than a batch
    assert (data.position, data.epoch) == (20, 2)
    assert next(iter(data)).tolist() == [0, 1, 2, 3]
    assert data.position == 24


def test_a_loop_overtaken_by_another_says_so() -> None:
    data = make(10)
    old = iter(data)
    next(old)
    next(iter(data))
    with pytest.raises(DataError, match="this iteration is over: the loader was sent elsewhere"):
        next(old)
    looping = iter(data)
    next(looping)
    data.seek(0)
    with pytest.raises(DataError, match="A loader has one position"):
        next(looping)
    assert data.position == 0


def test_ranks_without_samples_get_empty_batches() -> None:
    dataset = TensorDataset(torch.arange(12.0).view(3, 2, 2), torch.arange(3))
    loaders = [loader(dataset, global_batch=2, rank=rank, size=4) for rank in range(4)]
    for parts in zip(*loaders, strict=True):
        assert [y.numel() for _, y in parts][2:] == [0, 0]
        assert all(x.shape[1:] == (2, 2) and x.dtype == torch.float32 for x, _ in parts)
        assert all(y.dtype == torch.int64 for _, y in parts)
    assert [one.share for one in loaders] == [(1, 1, 0), (0, 1, 0), (0, 1, 0), (0, 1, 0)]


class Plain:
    """Not a Dataset at all: a length and items will do."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < 6:
            raise IndexError
        return {"x": torch.full((2,), float(index)), "name": f"sample {index}"}


class Batched(Plain):
    """Like a Hugging Face dataset: hands over many samples at a call."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        self.calls.append(list(indices))
        return [self[index] for index in indices]


@pytest.mark.parametrize(
    ("dataset", "as_list"),
    [
        ([10, 11, 12, 13, 14, 15], lambda batch: [x - 10 for x in batch.tolist()]),
        (torch.arange(6), lambda batch: batch.tolist()),
        (np.arange(6), lambda batch: batch.tolist()),
        (range(6), lambda batch: batch.tolist()),
        (TensorDataset(torch.arange(6)), lambda batch: batch[0].tolist()),
        (
            Subset(list(range(100, 120)), [5, 6, 7, 8, 9, 10]),
            lambda b: [x - 105 for x in b.tolist()],
        ),
        (Plain(), lambda batch: batch["x"][:, 0].int().tolist()),
        (Plain(), lambda batch: [int(name.split()[1]) for name in batch["name"]]),
        (Batched(), lambda batch: batch["x"][:, 1].int().tolist()),
    ],
)
def test_anything_with_a_length_and_items_is_a_dataset(dataset, as_list) -> None:
    data = loader(dataset, global_batch=4, shuffle=False, rank=0, size=1)
    assert [as_list(batch) for batch in data] == [[0, 1, 2, 3], [4, 5]]


def test_batched_datasets_are_called_once_a_batch() -> None:
    dataset = Batched()
    data = loader(dataset, global_batch=4, shuffle=False, rank=0, size=1)
    list(data)
    assert dataset.calls == [[0, 1, 2, 3], [4, 5]]


def test_collate_fn_makes_the_batch() -> None:
    data = make(4, collate_fn=lambda samples: {"count": len(samples)}, global_batch=3)
    assert list(data) == [{"count": 3}, {"count": 1}]


class Augmented(Dataset[Any]):
    """Draws from every process-wide generator there is."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> torch.Tensor:
        numbers = [torch.rand(()).item(), random.random(), np.random.rand()]
        return torch.tensor([index, *numbers], dtype=torch.float64)


class AugmentedBatches(Augmented):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


def augmented(dataset: Any, size: int, epochs: int = 2, **options: Any) -> torch.Tensor:
    options = {"global_batch": 4, "seed": 5, **options}
    loaders = [loader(dataset, rank=rank, size=size, **options) for rank in range(size)]
    return torch.cat(
        [part for _ in range(epochs) for parts in zip(*loaders, strict=True) for part in parts]
    )


def test_augmentation_depends_on_seed_epoch_and_index_only() -> None:
    torch.manual_seed(1)
    alone = augmented(Augmented(), 1)
    torch.manual_seed(2)
    random.seed(2)
    for size in (2, 3, 5):
        assert torch.equal(augmented(Augmented(), size), alone)
    assert torch.equal(augmented(AugmentedBatches(), 3), alone)
    assert torch.equal(augmented(Subset(Augmented(), range(9)), 2, global_batch=5), alone)
    first, second = (epoch[epoch[:, 0].argsort()] for epoch in (alone[:9], alone[9:]))
    assert torch.equal(first[:, 0], second[:, 0])
    assert not torch.isclose(first[:, 1:], second[:, 1:]).any()
    assert alone[:, 1:].unique().numel() == alone[:, 1:].numel()
    assert not torch.equal(augmented(Augmented(), 1, seed=6)[:, 1:], alone[:, 1:])


class Seldom(Augmented):
    """Most samples draw nothing; a broken one is replaced by a random other."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.randrange(9) if index == 5 else index])


class OneObject(Augmented):
    """Hands over a whole batch as one object that only its collate function understands."""

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        return {"index": indices, "noise": torch.rand(len(indices))}


class ReadsTheSeed(Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(np.random.default_rng(torch.initial_seed() + index).random())


def test_augmentation_that_comes_seldom_or_by_the_seed() -> None:
    for dataset in (Seldom(), ReadsTheSeed()):
        alone = augmented(dataset, 1)
        for size in (2, 4):
            assert torch.equal(augmented(type(dataset)(), size), alone)
    assert alone.unique().numel() == alone.numel()


def test_a_batch_in_one_object_repeats_itself_after_a_resume() -> None:
    def batches(start: int) -> list[list[float]]:
        data = loader(OneObject(), global_batch=3, collate_fn=dict, rank=0, size=1)
        data.seek(start)
        return [batch["noise"].tolist() for batch in data]

    whole = batches(0)
    assert len({number for batch in whole for number in batch}) == 9
    assert batches(3) == whole[1:]


def test_a_sample_that_loads_numpy_finds_it_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loads(Augmented):
        def __getitem__(self, index: int) -> torch.Tensor:
            sys.modules["numpy.random"] = np.random
            return torch.tensor(np.random.rand())

    expected = augmented(Loads(), 1)
    np.random.seed()
    monkeypatch.delitem(sys.modules, "numpy.random")
    assert torch.equal(augmented(Loads(), 1), expected)


def test_samples_that_draw_nothing_are_fetched_once() -> None:
    class Counted(Augmented):
        fetched = 0

        def __getitem__(self, index: int) -> int:
            self.fetched += 1
            return index

    dataset = Counted()
    list(loader(dataset, global_batch=4, rank=0, size=1))
    assert dataset.fetched == 9


def test_the_fetcher_can_be_sent_to_a_spawned_worker() -> None:
    fetcher = pickle.loads(pickle.dumps(Fetcher(AugmentedBatches(), torch.stack, seed=5)))
    delivery = fetcher.__getitems__(BatchRequest(0, [3, 4], 2, 2))
    assert delivery.batch[:, 0].tolist() == [3, 4]


def test_fetching_leaves_the_callers_generators_alone() -> None:
    def draw() -> list[float]:
        return [torch.rand(()).item(), random.gauss(0, 1), np.random.randn()]

    def reset() -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)

    reset()
    expected = [draw() for _ in range(3)]
    reset()
    data = loader(Augmented(), global_batch=3, rank=0, size=1)
    assert [draw() for _ in data] == expected


def test_a_random_collate_fn_repeats_itself_after_a_resume() -> None:
    def collate(samples: list[int]) -> torch.Tensor:
        return torch.rand(len(samples))

    torch.manual_seed(0)
    whole = [batch.tolist() for batch in make(10, collate_fn=collate)]
    torch.manual_seed(1)
    resumed = make(10, collate_fn=collate)
    resumed.seek(4)
    assert [batch.tolist() for batch in resumed] == whole[1:]
