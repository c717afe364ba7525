"""Global batch = per-device batch × data-parallel ranks × accumulate, however it is said."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from paceline.data import loader
from paceline.errors import DataError
from paceline.layout.batch import BatchSizes

SAME = [
    ({"global_batch": 64}, 64, None),
    ({"global_batch": 64, "microbatch": 8}, 64, 8),
    ({"per_device_batch": 32}, 64, 32),
    ({"per_device_batch": 8, "accumulate": 4}, 64, 8),
    ({"microbatch": 8, "accumulate": 4}, 64, 8),
    ({"global_batch": 64, "accumulate": 4}, 64, 8),
    ({"global_batch": 64, "per_device_batch": 8}, 64, 8),
    ({"global_batch": 64, "per_device_batch": 8, "accumulate": 4, "microbatch": 8}, 64, 8),
]
WRONG = [
    ({"global_batch": 60, "per_device_batch": 8}, "not a multiple of per_device_batch=8 × 2"),
    (
        {"global_batch": 60, "accumulate": 8},
        "not a multiple of 2 data-parallel ranks × accumulate=8",
    ),
    (
        {"global_batch": 32, "per_device_batch": 8, "accumulate": 4},
        "global_batch=32 does not agree with per_device_batch=8 × 2 data-parallel ranks × "
        "accumulate=4 = 64",
    ),
    ({"per_device_batch": 8, "microbatch": 4}, "per_device_batch=8 and microbatch=4 both say"),
    ({"accumulate": 4}, "accumulate=4 alone does not say how many samples a step takes"),
    ({"per_device_batch": 0}, "per_device_batch=0 must be a whole number, 1 or more"),
    ({"accumulate": 1.5, "global_batch": 3}, "accumulate=1.5 must be a whole number"),
]


@pytest.mark.parametrize(("said", "total", "microbatch"), SAME)
def test_one_algebra(said: dict[str, int], total: int, microbatch: int | None) -> None:
    sizes = BatchSizes(**said).on(2)
    assert (sizes.global_batch, sizes.microbatch) == (total, microbatch)
    assert sizes.on(2) == sizes


@pytest.mark.parametrize(("said", "message"), WRONG)
def test_contradictions_are_refused_with_the_numbers(said: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        BatchSizes(**said).on(2)
    assert message in str(caught.value)


def test_other_ranks_keep_the_batch() -> None:
    assert BatchSizes(64, accumulate=4).on(3, exact=False) == BatchSizes(64, microbatch=6)
    assert BatchSizes(64, 8, 4).on(3, exact=False) == BatchSizes(64, microbatch=8)


def shares(data: Any) -> list[int]:
    return [len(batch) for batch in data]


def test_a_loader_takes_them() -> None:
    data = loader(range(40), per_device_batch=4, accumulate=2, rank=0, size=2)
    assert (data.global_batch, data.microbatch, data.passes, len(data)) == (16, 4, 2, 3)
    assert shares(data) == [8, 8, 4]
    existing = DataLoader(range(40), batch_size=4)
    data = loader(existing, per_device_batch=4, rank=0, size=2)
    assert (data.global_batch, shares(data)) == (8, [4] * 5)
    sampled = DataLoader(range(40), batch_size=4, sampler=RandomSampler(range(40), True))
    assert shares(loader(sampled, per_device_batch=4, rank=0, size=2)) == [4] * 5
    own = DataLoader(range(40), batch_sampler=BatchSampler(range(0, 40, 2), 4, False))
    assert shares(loader(own, rank=0, size=2)) == [2] * 5
    for wrong, message in (
        (lambda: loader(existing, per_device_batch=5), "per_device_batch=5 does not agree"),
        (lambda: loader(DataLoader(range(9), batch_size=None), per_device_batch=5), "own size"),
    ):
        with pytest.raises(DataError, match=message):
            wrong()


def test_the_batch_of_the_start_is_kept_at_other_ranks() -> None:
    data = loader(range(40), per_device_batch=4, rank=0, size=2)
    next(iter(data))
    state = data.state_dict()
    assert state["global_batch"] == 8
    there = loader(range(40), per_device_batch=4, rank=0, size=4)
    assert there.global_batch == 16
    there.load_state_dict(state)
    assert (there.global_batch, there.microbatch, len(there)) == (8, 4, 5)
    assert shares(there) == [2] * 4
    stated = loader(range(40), global_batch=16, rank=0, size=4)
    stated.load_state_dict(state)  # a batch that is stated is that
    assert stated.global_batch == 16


@pytest.mark.world(2)
def test_a_dataloader_is_said_to_be_global_once_on_rank_0(ranks: Any) -> None:
    def job() -> list[list[str]]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("paceline").addHandler(handler)
        try:
            existing = DataLoader(TensorDataset(torch.arange(32)), batch_size=8)
            data = loader(existing)
            for _ in range(2):
                assert [len(x) for [x] in data] == [4] * 4
            list(loader(existing, global_batch=8))
            assert [len(x) for [x] in loader(existing, per_device_batch=8)] == [8] * 2
        finally:
            logging.getLogger("paceline").removeHandler(handler)
        return said

    first, second = ranks(job)
    assert first == [
        "the DataLoader's batch_size=8 is the global batch: 4 samples on each of 2 data-parallel "
        "ranks. For 8 on each, pass per_device_batch=8; if it is meant so, pass global_batch=8."
    ]
    assert second == []
