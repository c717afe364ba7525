from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from paceline.checkpoint.boxes import Box
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.rank_state import Part, Piece, RankState, whole_part
from paceline.checkpoint.retention import Keep
from paceline.checkpoint.sharded import write_share
from paceline.checkpoint.sharded.async_saver import AsyncSaver, SaveOutcome
from paceline.checkpoint.storage.local import LocalStorage
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
    folder = on(Disk(tmp_path, before=lambda path: gate.wait(300) and None))
    saver = AsyncSaver(folder, None, Keep())
    weights = torch.full((1000,), 1.0)
    assert saver.save(1, state_of(weights), {"reason": "every"}) < 100
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
    asked = [threading.Event() for _ in range(4)]

    def slow(path: str) -> None:
        """The disk takes a while from when the next save is asked for."""
        asked[int(path.split("/")[0].removeprefix("step-")) + 1].wait(300)
        time.sleep(0.5)

    folder = on(Disk(tmp_path, before=slow))
    saver = AsyncSaver(folder, None, Keep(last=9))
    weights = torch.zeros(1000)
    saver.reserve(state_of(weights))
    size = saver._copy.size
    waited = []
    for step in range(3):
        weights.fill_(step)
        asked[step].set()
        waited.append(saver.save(step, state_of(weights, step), {}))
        assert len([t for t in threading.enumerate() if t.name.startswith("save of")]) <= 1
        assert saver._copy.size == size
    assert waited[0] < 100, "it did not wait for the disk"
    assert min(waited[1:]) > 0.15
    asked[3].set()
    outcomes = saver.close()
    assert [outcome.step for outcome in outcomes] == [0, 1, 2]
    assert outcomes[1].stalled >= waited[1]
    assert [value_of(folder, step) for step in range(3)] == [0.0, 1.0, 2.0]
    assert [folder.get(step).read_object("loop") for step in range(3)] == [0, 1, 2]
    assert saver._copy.size == 0


def test_a_failed_save_is_told_and_later_ones_work(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    saver = AsyncSaver(on(disk), None, Keep(last=1))
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
    saver = AsyncSaver(Folder(tmp_path), None, None)
    saver.save(1, state_of(torch.ones(3), loop=(n for n in range(3))), {})
    (outcome,) = saver.close()
    assert "object 'loop' cannot be copied" in (outcome.error or "")


def test_retention_follows_a_good_save_only(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    keep = Keep(last=2, best=1, metric="loss", every=4)
    saver = AsyncSaver(folder, None, keep)
    for step, loss in enumerate([3.0, 1.0, 2.0, 5.0, 4.0, 6.0, 7.0, 8.0]):
        saver.save(step, state_of(torch.ones(3)), {"metrics": {"loss": loss}})
    saver.close()
    assert [c.step for c in folder.checkpoints()] == [0, 1, 4, 6, 7]


def test_a_later_one_that_could_not_be_used_does_not_count(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    saver = AsyncSaver(folder, None, Keep(last=1))
    saver.save(20, state_of(torch.ones(3)), {})
    saver.save(5, state_of(torch.ones(3)), {})  # resumed from an older one: 20 was damaged
    saver.save(6, state_of(torch.ones(3)), {})
    assert [outcome.error for outcome in saver.close()] == [None] * 3
    assert [c.step for c in folder.checkpoints()] == [6, 20]


def test_older_ones_that_cannot_be_deleted_are_a_warning(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    saver = AsyncSaver(on(disk), None, Keep(last=1))
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


def _train(where: str) -> list[SaveOutcome]:
    group = dist.new_group(backend="gloo")
    rank = dist.get_rank()
    saver = AsyncSaver(Folder(where), group, Keep(last=2))
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


def _save_what_all_hold(where: str) -> list[Any]:
    group = dist.new_group(backend="gloo")
    rank = dist.get_rank()
    planned = []
    plan = write_share.plan_write_share

    def counted(*given: Any) -> Any:
        planned.append(step)
        return plan(*given)

    tensors = {f"w{i}": torch.full((1000,), float(i)) for i in range(10)}
    saver = AsyncSaver(Folder(where), group, None)
    sizes = []
    with mock.patch.object(write_share, "plan_write_share", counted):
        for step in range(6):
            for tensor in tensors.values():
                tensor += 1
            if step == 2 and rank == 1:  # only one rank has something new
                tensors["own"] = torch.full((500,), 7.0)
            if step == 4:
                tensors["w3"] = torch.full((3, 1000), 3.0)
            state = RankState({name: whole_part(tensor) for name, tensor in tensors.items()})
            state.objects[f"random/{rank}"] = [step] * step
            if step == 5:
                state.tensors["w1"] = Part((1000,), torch.float32, ())  # on no rank
            saver.save(step, state, {})
            sizes.append(sum(p.tensor.nbytes for p in pieces_in(saver._copy._copies)))
            outcomes = saver.wait()
            if step < 5:
                assert [outcome.error for outcome in outcomes] == [None]
    saver.close()
    return [planned, sizes, outcomes[0].error]


def pieces_in(parts: dict[str, Part]) -> list[Piece]:
    return [piece for part in parts.values() for piece in part.pieces]


@pytest.mark.world(2)
def test_what_all_ranks_hold_is_copied_by_the_one_that_writes_it(
    ranks: Any, tmp_path: Path
) -> None:
    first, second = ranks(_save_what_all_hold, str(tmp_path))
    assert first[0] == second[0] == [0, 2, 4, 5]  # planned anew when any rank's state is another
    for step in (0, 1):
        assert first[1][step] == second[1][step] == 5 * 4000
    assert first[1][2] + second[1][2] == 10 * 4000 + 2000
    assert first[1][4] + second[1][4] == 12 * 4000 + 2000
    assert re.search("'w1' of shape .* 0 of its 1000 elements", first[2])
    folder = Folder(tmp_path)
    for step in range(5):
        checkpoint = folder.get(step)
        assert not checkpoint.damages()
        for i in range(10):
            found = checkpoint.read_tensor(f"w{i}")
            changed = step == 4 and i == 3
            assert torch.equal(found, torch.full_like(found, 3.0 if changed else i + step + 1))
        if step >= 2:
            found = checkpoint.read_tensor("own")
            assert torch.equal(found, torch.full((500,), 7.0 + step - 2))
        assert checkpoint.read_object("random/1") == [step] * step


def die(path: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_while_saving(where: str) -> None:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=5))
    rank = dist.get_rank()
    saver = AsyncSaver(Folder(where), group, Keep())
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


# A process that ends without close()

_ENDS = """
import datetime, os, signal, sys, time
import torch
import torch.distributed as dist
from paceline.checkpoint.sharded import async_saver as savers
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.rank_state import RankState, whole_part

where, rank = sys.argv[1], int(sys.argv[2])
group = None
if rank >= 0:
    savers._AT_EXIT_S = 0.5
    dist.init_process_group("gloo", init_method=f"file://{where}/store", rank=rank, world_size=2)
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=600))
folder = Folder(f"{where}/run")
create = folder.storage.create
folder.storage.create = lambda path, chunks: (time.sleep(0.5), create(path, chunks))
saver = savers.AsyncSaver(folder, group, None)
if rank == 1:
    saver._copy.take = lambda state: os.kill(os.getpid(), signal.SIGSTOP)
tensors = {f"w{i}": torch.full((500_000,), float(i)) for i in range(6)}
saver.save(1, RankState({name: whole_part(tensor) for name, tensor in tensors.items()}), {})
print(time.monotonic(), flush=True)
"""


def _ending(where: Path, rank: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _ENDS, str(where), str(rank)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_the_save_in_flight_is_finished_when_python_ends(tmp_path: Path) -> None:
    process = _ending(tmp_path, -1)
    process.communicate()
    assert process.returncode == 0
    (checkpoint,) = Folder(tmp_path / "run").checkpoints()
    assert not checkpoint.damages()
    assert checkpoint.read_tensor("w5")[-1] == 5.0


def test_ranks_that_do_not_answer_do_not_keep_python_from_ending(tmp_path: Path) -> None:
    hanging = _ending(tmp_path, 1)
    try:
        process = _ending(tmp_path, 0)
        said, _ = process.communicate(timeout=300)
        took = time.monotonic() - float(said)
    finally:
        hanging.kill()
        hanging.communicate()
    assert process.returncode == 0
    assert 0.5 < took < 200
    assert not Folder(tmp_path / "run").checkpoints()
