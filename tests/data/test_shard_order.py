"""Shards in one process: the order, and every sample once through kill and rescale."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.uneven_shards import Presharded, every, read, read_from, shards_of
from paceline.data import loader, shards
from paceline.data.shard_order import ShardOrder
from paceline.errors import DataError

COUNTS = st.lists(st.integers(0, 40), min_size=3, max_size=17).filter(any)


@settings(max_examples=40, deadline=None)
@given(
    counts=COUNTS,
    seed=st.integers(0, 2**40),
    lanes=st.one_of(st.none(), st.integers(1, 9)),
    chunk=st.integers(1, 20),
    window=st.integers(1, 20),
    cut=st.integers(1, 50),
)
def test_an_epoch_is_a_permutation_of_which_any_part_can_be_drawn(
    counts: list[int], seed: int, lanes: int | None, chunk: int, window: int, cut: int
) -> None:
    order = ShardOrder(counts, seed, lanes=lanes, chunk=chunk, window=window)
    whole = order.indices(3, 0, order.n).tolist()
    assert sorted(whole) == list(range(sum(counts)))
    fresh = ShardOrder(counts, seed, lanes=lanes, chunk=chunk, window=window)
    stops = range(0, order.n, cut)
    parts = [fresh.indices(3, at, min(at + cut, order.n)) for at in reversed(stops)][::-1]
    assert torch.cat(parts).tolist() == whole


@settings(max_examples=25, deadline=None)
@given(
    counts=COUNTS,
    seed=st.integers(0, 9),
    runs=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 24), st.integers(0, 5)),
        min_size=1,
        max_size=4,
    ),
    starts=st.booleans(),
)
def test_every_sample_once_an_epoch_through_kills_and_rescales(
    counts: list[int], seed: int, runs: list[tuple[int, int, int]], starts: bool
) -> None:
    """Runs of other ranks and batch sizes, each killed after some batches, follow one order."""
    dataset = shards(shards_of(counts), read=read_from if starts else read, window=8)
    alone = every([loader(dataset, global_batch=7, seed=seed, rank=0, size=1)])
    assert sorted(alone) == list(range(sum(counts)))
    state, seen = None, []
    for ranks, batch, killed in [*runs, (2, 5, None)]:
        if len(seen) == len(alone):
            break
        loaders = [
            loader(dataset, global_batch=batch, seed=seed, rank=rank, size=ranks)
            for rank in range(ranks)
        ]
        for one in loaders:
            if state is not None:
                one.load_state_dict(state)
        if killed != 0:
            seen += every(loaders, killed)
        state = loaders[0].state_dict()
    assert seen == alone


def test_a_stream_that_says_its_shards_is_read_like_shards() -> None:
    counts = [7, 30, 1, 12]
    dataset = shards(shards_of(counts), read=read)
    expected = every([loader(dataset, global_batch=8, rank=0, size=1)])
    stream = Presharded(counts)
    pair = [loader(stream, global_batch=8, rank=rank, size=2) for rank in range(2)]
    assert every(pair) == expected
    in_order = every([loader(stream, global_batch=8, shuffle=False, rank=0, size=1)])
    assert in_order == list(stream) == list(range(50))


def test_samples_are_mixed_within_and_between_shards() -> None:
    order = ShardOrder([1000] * 64, 0)
    first = order.indices(0, 0, 1024).numpy()
    assert len(np.unique(first // 1000)) > 40
    neighbours = np.abs(np.diff(first)) == 1
    assert neighbours.mean() < 0.05
    assert not torch.equal(order.indices(1, 0, 1024), order.indices(0, 0, 1024))
    assert not torch.equal(
        ShardOrder([1000] * 64, 1).indices(0, 0, 1024), order.indices(0, 0, 1024)
    )


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (1, 4), (2, 2), (4, 4)])
def test_readers_go_through_parts_of_their_own(ranks: int, workers: int) -> None:
    """Only a shard that a lane begins or ends in may be read by two."""
    counts = [190, 210, 333, 90] * 32
    order, batch = ShardOrder(counts, 5), 64
    ends = np.cumsum(counts)
    readers: dict[int, set[tuple[int, int]]] = {}
    for step in range(order.n // batch):
        for rank in range(ranks):
            each = batch // ranks
            start = step * batch + rank * each
            for index in order.indices(0, start, start + each).tolist():
                shard = int(np.searchsorted(ends, index, side="right"))
                readers.setdefault(shard, set()).add((rank, step % workers))
    shared = [shard for shard, who in readers.items() if len(who) > 1]
    assert len(readers) == len(counts)
    assert len(shared) <= order.lanes
    assert len(set.union(*readers.values())) == ranks * workers


def test_a_state_of_other_shards_is_refused() -> None:
    state = loader(shards(shards_of([5, 6]), read=read), global_batch=2).state_dict()
    other = loader(shards(shards_of([6, 5]), read=read), global_batch=2)
    with pytest.raises(DataError, match="saved with shards="):
        other.load_state_dict(state)


def test_a_shard_that_changed_is_found() -> None:
    dataset = shards(shards_of([5, 6]), read=read, counts=[5, 7])
    with pytest.raises(DataError, match=r"shard \(5, 6\) ended after 6 samples, but 7 were"):
        every([loader(dataset, global_batch=2, shuffle=False, rank=0, size=1)])
