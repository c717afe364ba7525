"""Loader workers: they change the speed and nothing else."""

import gc
import multiprocessing
import os
import random
import signal
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, get_worker_info

from paceline.data import loader


@pytest.fixture(autouse=True)
def _no_worker_is_left_behind():
    yield
    gc.collect()
    assert multiprocessing.active_children() == []


class Augmented(Dataset[Any]):
    def __init__(self, n: int = 23) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        numbers = [torch.rand(()).item(), random.random(), np.random.rand()]
        return torch.tensor([index, *numbers], dtype=torch.float64)


class Pids(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def run(workers: int, start: int = 0, dataset: Any = None, **options: Any) -> list[torch.Tensor]:
    options = {"global_batch": 4, "seed": 1, "rank": 0, "size": 1, **options}
    with loader(dataset or Augmented(), workers=workers, **options) as data:
        data.seek(start)
        return [*data, *data]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_any_number_of_workers_gives_the_same_batches() -> None:
    alone = run(0)
    assert len(alone) == 12
    assert equal(run(1), alone)
    assert equal(run(2), alone)
    assert equal(run(2, dataset=Subset(Augmented(), range(23))), alone)


def test_workers_resume_in_the_middle_of_an_epoch() -> None:
    assert equal(run(2, start=8), run(0)[2:])
    assert equal(run(2, start=8, rank=1, size=3), run(0, rank=1, size=3)[2:])


def test_workers_fill_empty_shares() -> None:
    shapes = [batch.shape for batch in run(2, rank=2, size=3, global_batch=2)]
    assert shapes == [(0, 4)] * 24


def test_what_workers_fetch_ahead_does_not_count() -> None:
    data = loader(Augmented(), global_batch=4, workers=2, rank=0, size=1)
    iterator = iter(data)
    next(iterator)  # by now the workers are four batches further on
    assert data.position == 4
    assert data.state_dict()["position"] == 4
    iterator.close()
    assert data.position == 4
    resumed = loader(Augmented(), global_batch=4, rank=0, size=1)
    resumed.load_state_dict(data.state_dict())
    with data:
        assert equal(list(data), list(resumed))


def test_workers_live_from_epoch_to_epoch_and_end_on_break() -> None:
    data = loader(Pids(), global_batch=3, workers=2, rank=0, size=1)
    first, second = ({pid for batch in data for pid in batch.tolist()} for _ in range(2))
    assert first == second
    assert len(first) == 2
    assert os.getpid() not in first
    for _ in data:
        break
    assert multiprocessing.active_children() == []
    third = {pid for batch in data for pid in batch.tolist()}
    assert third.isdisjoint(first)
    data.close()
    assert multiprocessing.active_children() == []
    assert data.position == 36


def test_dropping_the_loader_ends_its_workers() -> None:
    data = loader(Pids(), global_batch=3, workers=2, rank=0, size=1)
    list(data)
    assert len(multiprocessing.active_children()) == 2
    gc.disable()  # by reference count alone: no cycle may keep them alive
    try:
        del data
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()


def test_an_iteration_overtaken_by_seek_starts_over_in_the_same_workers() -> None:
    with loader(range(20), global_batch=4, shuffle=False, workers=2, rank=0, size=1) as data:
        for _ in data:
            data.seek(8)
            break
        assert next(iter(data)).tolist() == [8, 9, 10, 11]


class Faulty(Pids):
    def __init__(self, fault: Any) -> None:
        self.fault = fault

    def __getitem__(self, index: int) -> int:
        if index == 5:
            self.fault()
        return index


def fail() -> None:
    raise OSError("the disk is gone")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_error_in_a_worker_reaches_the_loop() -> None:
    data = loader(Faulty(fail), global_batch=4, shuffle=False, workers=1, rank=0, size=1)
    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        seen.extend(batch.tolist() for batch in data)
    assert data.position == 4
    assert seen == [[0, 1, 2, 3]]
    assert multiprocessing.active_children() == []


def test_a_killed_worker_reaches_the_loop() -> None:
    data = loader(Faulty(die), global_batch=4, shuffle=False, workers=1, rank=0, size=1)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(data)
    assert data.position in (0, 4)  # the death may be noticed before the first batch is taken
    assert multiprocessing.active_children() == []


def test_workers_leave_the_models_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with loader(Augmented(), global_batch=8, workers=1, rank=0, size=1) as data:
        drawn = torch.stack([torch.rand(()) for _ in data])
    assert torch.equal(drawn, expected)


class Sized(Pids):
    opened = "not yet"

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        return -1 if info is None else info.dataset.n  # type: ignore[attr-defined]

    n = 77


def test_a_worker_finds_its_dataset() -> None:
    with loader(Sized(), global_batch=12, workers=1, rank=0, size=1) as data:
        assert next(iter(data)).tolist() == [77] * 12
