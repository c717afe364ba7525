"""Shards read by real workers and ranks, which are killed and change in number."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from data.uneven_shards import Presharded, every, read, shards_of
from paceline.data import loader, shards
from paceline.testing.faults import FaultPlan, kill_at
from paceline.world import World, collectives

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")

COUNTS = [13, 40, 1, 0, 29, 17, 8]
SAMPLES, BATCH = sum(COUNTS), 12
PER_EPOCH = SAMPLES // BATCH


def draws(number: int) -> torch.Tensor:
    """A sample with augmentation, which must not depend on who reads it."""
    return torch.tensor([number, torch.rand(()).item()], dtype=torch.float64)


def test_any_workers_give_the_same_samples() -> None:
    dataset = shards(shards_of(COUNTS), read=read, map=draws, window=4, chunk=3)

    def two_epochs(workers: int, ranks: int, start: int) -> Any:
        each = []
        for rank in range(ranks):
            options = dict(global_batch=BATCH, workers=workers, rank=rank, size=ranks)
            with loader(dataset, **options) as data:  # type: ignore[arg-type]
                data.seek(start)
                each.append([*data, *data])
        return torch.cat([part for parts in zip(*each, strict=True) for part in parts])

    alone = two_epochs(0, 1, 0)
    assert sorted(alone[:SAMPLES, 0].tolist()) == list(range(SAMPLES))
    assert sorted(alone[SAMPLES:, 0].tolist()) == list(range(SAMPLES))
    assert len(alone[:, 1].unique()) == 2 * SAMPLES
    for workers, ranks, start in ((4, 1, 0), (1, 2, 30), (2, 3, 24), (0, 4, 60)):
        assert torch.equal(two_epochs(workers, ranks, start), alone[start:])


def note_reader(shard: tuple[int, int], start: int = 0) -> Any:
    first, count = shard
    for number in range(first + start, first + count):
        yield torch.tensor([first, number, os.getpid()])


def test_workers_read_shards_of_their_own() -> None:
    dataset = shards(shards_of([64] * 16), read=note_reader, chunk=16)
    with loader(dataset, global_batch=64, workers=4, rank=0, size=1) as data:
        seen = torch.cat(list(data))
    readers = {int(shard): set() for shard in seen[:, 0]}  # type: ignore[var-annotated]
    for shard, _, pid in seen.tolist():
        readers[shard].add(pid)
    assert [len(pids) for pids in readers.values()] == [1] * 16
    assert len(set.union(*readers.values())) == 4


@pytest.mark.world(3)
def test_ranks_compare_shards_and_go_on_from_each_others_state(ranks: Any) -> None:
    def job() -> Any:
        expected = every([loader(Presharded(COUNTS), global_batch=BATCH, rank=0, size=1)])

        def gathered(data: Any, most: int | None = None) -> list[int]:
            seen = []
            for step, batch in enumerate(data, 1):
                seen += [i for part in collectives.all_gather_object(batch.tolist()) for i in part]
                if step == most:
                    break
            return seen

        with loader(Presharded(COUNTS), global_batch=BATCH, workers=1) as data:
            start = gathered(data, 2)
            state = data.state_dict()
        with loader(Presharded(COUNTS), global_batch=5, workers=2) as data:
            data.load_state_dict(state)
            assert start + gathered(data) == expected
        differ = COUNTS if World.current().rank else COUNTS[::-1]
        with pytest.raises(paceline.errors.DataError, match="do not read the same data: shards is"):
            gathered(loader(Presharded(differ), global_batch=BATCH))

    ranks(job)


class Note(paceline.Callback):
    """Writes down the samples of each step; kills rank 1 after step 5, in its first life."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_start(self, trainer: Any) -> None:
        engine, step = trainer.engine, trainer.engine.step
        rank = World.current().rank

        def noting_step(batch: Any) -> Any:
            name = self.folder / f"{engine.steps_done + 1}-{rank}"
            name.write_text(" ".join(str(int(number)) for number in batch[1][:, 0]))
            return step(batch)

        engine.step = noting_step

    def on_step_end(self, trainer: Any, result: Any) -> None:
        FaultPlan(kill_at(rank=1, step=5)).reach(result.step)


def sample_of(number: int) -> Any:
    return torch.randn(4), torch.tensor([number, number % 2])


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target[:, 1])


def train(folder: Path, steps: int, nproc: int | None = None) -> None:
    torch.manual_seed(0)
    trainer = paceline.Trainer(
        nn.Linear(4, 2),
        optimizer=torch.optim.SGD,
        loss=loss_of,
        global_batch=BATCH,
        data=paceline.DataOptions(workers=1, drop_last=True),
        checkpoint=paceline.Checkpointing(every=2),
        run_dir=folder / "run",
        callbacks=[Note(folder)],
        progress=False,
    )
    dataset = shards(shards_of(COUNTS), read=read, map=sample_of)
    trainer.fit(dataset, steps=steps, nproc=nproc, resume=nproc is None)


def test_a_run_that_is_killed_and_rescaled_sees_every_sample_once(
    ranks: Any, tmp_path: Path
) -> None:
    train(tmp_path, 7, nproc=2)  # rank 1 is killed after step 5, and started again
    ranks(train, tmp_path, 2 * PER_EPOCH, world_size=3)
    expected = loader(
        shards(shards_of(COUNTS), read=read), global_batch=BATCH, drop_last=True, rank=0, size=1
    )
    for step, batch in enumerate([*expected, *expected], 1):
        files = [tmp_path / f"{step}-{rank}" for rank in range(2 if step <= 7 else 3)]
        seen = [int(number) for file in files for number in file.read_text().split()]
        assert seen == batch.tolist(), step
