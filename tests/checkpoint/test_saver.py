from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.checkpoint.boxes import Box
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.part import Part, Piece, RankState, whole_part
from paceline.checkpoint.retention import Keep
from paceline.checkpoint.saver import Outcome, Saver
from paceline.checkpoint.storage import LocalStorage
from paceline.errors import CheckpointError, RankFailed, StorageError

Chunks = Iterable[memoryview]


class Disk(LocalStorage):
    """A disk that asks ``before`` before each data file, and ``deleting`` before each folder."""

    def __init__(
        self,
        where: str | Path,
        before: Callable[[str], None] = lambda path: None,
        deleting: Callable[[str], None] = lambda path: None,
    ) -> None:
        super().__init__(where)
        self.before = before
        self.deleting = deleting

    def create(self, path: str, chunks: Chunks) -> None:
        self.before(path)
        super().create(path, chunks)

    def delete_folder(self, path: str) -> None:
        self.deleting(path)
        super().delete_folder(path)


def on(disk: LocalStorage) -> Folder:
    folder = Folder(disk.where)
    folder.storage = disk
    return folder


def state_of(weights: torch.Tensor, loop: object = 0) -> RankState:
    return RankState({"w": whole_part(weights)}, {"loop": loop})


def value_of(folder: Folder, step: int) -> float:
    return folder.get(step).read_tensor("w")[0].item()


def full(path: str) -> None:
    raise StorageError(f"cannot write {path}: No space left on device.")


def test_training_goes_on_while_the_disk_is_slow(tmp_path: Path) -> None:
    gate = threading.Event()
    folder = on(Disk(tmp_path, before=lambda path: gate.wait(30) and None))
    saver = Saver(folder, None, Keep())
    weights = torch.full((1000,), 1.0)
    assert saver.save(1, state_of(weights), {"reason": "every"}) < 0.1
    assert saver.finished() == []
    (thread,) = (t for t in threading.enumerate() if t.name == "save of step 1")
    assert thread.daemon
    weights.fill_(2.0)  # the next step of the training
    gate.set()
    (outcome,) = saver.wait()
    assert outcome.error is None
    assert outcome.warning is None
    assert (outcome.step, outcome.path) == (1, str(tmp_path / "step-000000001"))
    assert outcome.bytes == folder.get(1).manifest.size
    assert outcome.seconds > outcome.stalled
    assert value_of(folder, 1) == 1.0
    assert folder.get(1).manifest.info == {"reason": "every"}
    assert saver.finished() == []
    assert saver.close() == []


def test_one_save_in_flight_and_one_copy_in_memory(tmp_path: Path) -> None:
    folder = on(Disk(tmp_path, before=lambda path: time.sleep(0.2)))
    saver = Saver(folder, None, Keep(last=9))
    weights = torch.zeros(1000)
    saver.reserve(state_of(weights))
    size = saver._snapshot.size
    waited = []
    for step in range(3):
        weights.fill_(step)
        waited.append(saver.save(step, state_of(weights, step), {}))
        assert len([t for t in threading.enumerate() if t.name.startswith("save of")]) <= 1
        assert saver._snapshot.size == size
    assert waited[0] < 0.1
    assert min(waited[1:]) > 0.15
    outcomes = saver.close()
    assert [outcome.step for outcome in outcomes] == [0, 1, 2]
    assert outcomes[1].stalled >= waited[1]
    assert [value_of(folder, step) for step in range(3)] == [0.0, 1.0, 2.0]
    assert [folder.get(step).read_object("loop") for step in range(3)] == [0, 1, 2]
    assert saver._snapshot.size == 0


def test_a_failed_save_is_told_and_later_ones_work(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    saver = Saver(on(disk), None, Keep(last=1))
    weights = torch.ones(10)
    saver.save(1, state_of(weights), {})
    saver.wait()
    disk.before = full
    saver.save(2, state_of(weights), {})
    (failed,) = saver.wait()
    assert re.search(r"saving step 2 .* failed: cannot write .*No space left", failed.error or "")
    assert failed.bytes == 0
    assert os.listdir(tmp_path) == ["step-000000001"]
    disk.before = lambda path: None
    saver.save(3, state_of(weights), {})
    (good,) = saver.close()
    assert good.error is None
    assert os.listdir(tmp_path) == ["step-000000003"]
    with pytest.raises(CheckpointError, match="step 4 cannot be saved: the saver is closed"):
        saver.save(4, state_of(weights), {})


def test_what_cannot_be_copied_is_an_outcome_too(tmp_path: Path) -> None:
    saver = Saver(Folder(tmp_path), None, None)
    saver.save(1, state_of(torch.ones(3), loop=(n for n in range(3))), {})
    (outcome,) = saver.close()
    assert "object 'loop' cannot be copied" in (outcome.error or "")


def test_retention_follows_a_good_save_only(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    keep = Keep(last=2, best=1, metric="loss", every=4)
    saver = Saver(folder, None, keep)
    for step, loss in enumerate([3.0, 1.0, 2.0, 5.0, 4.0, 6.0, 7.0, 8.0]):
        saver.save(step, state_of(torch.ones(3)), {"metrics": {"loss": loss}})
    saver.close()
    assert [c.step for c in folder.checkpoints()] == [0, 1, 4, 6, 7]


def test_a_later_one_that_could_not_be_used_does_not_count(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    saver = Saver(folder, None, Keep(last=1))
    saver.save(20, state_of(torch.ones(3)), {})
    saver.save(5, state_of(torch.ones(3)), {})  # resumed from an older one: 20 was damaged
    saver.save(6, state_of(torch.ones(3)), {})
    assert [outcome.error for outcome in saver.close()] == [None] * 3
    assert [c.step for c in folder.checkpoints()] == [6, 20]


def test_older_ones_that_cannot_be_deleted_are_a_warning(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    saver = Saver(on(disk), None, Keep(last=1))
    saver.save(1, state_of(torch.ones(3)), {})
    saver.wait()

    def refuse(path: str) -> None:
        if path == "step-000000001":
            raise StorageError(f"cannot delete {path}: Read-only file system.")

    disk.deleting = refuse
    saver.save(2, state_of(torch.ones(3)), {})
    (outcome,) = saver.close()
    assert outcome.error is None
    assert "step 2 is saved, but older checkpoints" in (outcome.warning or "")
    assert "Read-only" in (outcome.warning or "")


# Several ranks


def sharded(weights: torch.Tensor, rank: int) -> RankState:
    part = Part((2, 3), torch.float32, (Piece(Box((rank, 0), (1, 3)), weights),))
    return RankState({"w": part, "b": whole_part(weights)}, {f"random/{rank}": rank})


def _train(where: str) -> list[Outcome]:
    group = dist.new_group(backend="gloo")
    rank = dist.get_rank()
    saver = Saver(Folder(where), group, Keep(last=2))
    weights = torch.zeros(1, 3)
    outcomes = []
    for step in range(6):
        weights.add_(1)
        dist.all_reduce(torch.ones(10))  # the training's own collectives, meanwhile
        if step == 2:
            outcomes += saver.wait()
            saver._folder = on(Disk(where, before=full)) if rank == 1 else Folder(where)
        state = sharded(weights, rank)
        if step == 4 and rank == 1:
            state.objects["odd"] = (n for n in range(3))
        saver.save(step, state, {})
        if step == 2:
            outcomes += saver.wait()
            saver._folder = Folder(where)
        outcomes += saver.finished()
    return outcomes + saver.close()


@pytest.mark.world(2)
def test_all_ranks_are_told_the_same(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(_train, str(tmp_path))
    told = [(o.step, o.error, o.bytes) for o in first]
    assert told == [(o.step, o.error, o.bytes) for o in second]
    assert [step for step, error, _ in told if error is None] == [0, 1, 3, 5]
    errors = {step: error for step, error, _ in told if error}
    assert re.search("failed on rank 1: cannot write .*No space left", errors[2])
    assert re.search("failed on rank 1: object 'odd' cannot be copied", errors[4])
    found = Folder(tmp_path).checkpoints()
    assert [checkpoint.step for checkpoint in found] == [3, 5]
    assert found[-1].read_tensor("w").tolist() == [[6.0] * 3] * 2


def die(path: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_while_saving(where: str) -> None:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=5))
    rank = dist.get_rank()
    saver = Saver(Folder(where), group, Keep())
    saver.save(1, sharded(torch.ones(1, 3), rank), {})
    saver.wait()
    dist.barrier(group)
    if rank == 1:
        saver._folder = on(Disk(where, before=die))
    saver.save(2, sharded(torch.ones(1, 3), rank), {})
    (outcome,) = saver.close()
    Path(where, "said").write_text(str(outcome.error))


@pytest.mark.world(2)
def test_a_rank_that_dies_is_an_outcome_for_the_others(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        ranks(_die_while_saving, str(tmp_path))
    assert "saving step 2" in (tmp_path / "said").read_text()
    assert "another rank did not answer" in (tmp_path / "said").read_text()
    (left,) = Folder(tmp_path).checkpoints()
    assert not left.damages()
