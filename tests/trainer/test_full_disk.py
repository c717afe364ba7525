"""A disk that is full, read-only or gone costs what cannot be written, not the run."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline import events
from paceline.errors import NotSaved
from paceline.events import CheckpointSaved, EventLog, EventsLost, Note, StepDone


def step(number: int) -> StepDone:
    return StepDone(step=number, epoch=0, loss=1.0, lr=0.1, samples=4, seconds=0.2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 300 kB."""
    where = tmp_path / "disk"
    where.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(where)],
        check=False,
        capture_output=True,
    )
    if not done or done.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while file.write(b"x" * 512):
            pass
    return filler


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_events_are_dropped_counted_and_told_once_there_is_room(small_disk: Path) -> None:
    said: list[str] = []
    log = EventLog(small_disk / "run", said.append)
    assert log.write(step(1))
    filler = fill(small_disk)
    written = [log.write(step(number)) for number in range(2, 2000)]
    assert not written[-1]
    lost = written.count(False)
    assert len(said) == 1
    assert "events.jsonl (No space left on device). The run goes on" in said[0]
    filler.unlink()
    assert log.write(Note(message="room again"))
    log.close()
    *kept, told, last = events.read(small_disk / "run")
    assert len(kept) == len(written) - lost + 1
    assert isinstance(told, EventsLost)
    assert (told.count, told.what) == (lost, {"StepDone": lost})
    assert told.error == "No space left on device"
    assert last.message == "room again"


def test_a_line_cut_by_the_end_of_the_disk_harms_no_other(tmp_path: Path) -> None:
    log, other = EventLog(tmp_path), EventLog(tmp_path)
    log.write(step(1))
    with largest_file(os.path.getsize(log.path) + 20):
        assert not log.write(step(2)), "20 bytes of it fit"
    assert other.write(step(3))
    assert log.write(step(4))
    for one in (log, other):
        one.close()
    kinds = [type(e).__name__ for e in events.read(tmp_path)]
    assert kinds == ["StepDone", "StepDone", "EventsLost", "StepDone"]


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE])
def test_whatever_the_system_refuses(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    log = EventLog(tmp_path, said.append)

    def refuse(descriptor: int) -> os.stat_result:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("paceline.events.log.os.fstat", refuse)
        assert not log.write(step(1))
    assert os.strerror(number) in said[0]
    assert log.write(step(2))
    log.close()


def test_a_log_that_is_deleted_is_begun_anew(tmp_path: Path) -> None:
    said: list[str] = []
    log = EventLog(tmp_path / "run", said.append)
    log.write(step(1))
    shutil.rmtree(tmp_path / "run")
    assert log.write(step(2))
    assert "was deleted while the run goes on" in said[0]
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").touch()  # where nothing can be made anew
    assert not log.write(step(3))
    (tmp_path / "run").unlink()
    assert log.write(step(4))
    log.close()
    assert [type(e).__name__ for e in events.read(tmp_path / "run")] == ["EventsLost", "StepDone"]


class Disk(paceline.Callback):
    """Fills the disk after one step, and may empty it after another."""

    def __init__(self, disk: Path, full_at: int, free_at: int | None = None) -> None:
        self.disk, self.full_at, self.free_at = disk, full_at, free_at

    def on_step_end(self, trainer: Any, result: Any) -> None:
        if trainer.step == self.full_at:
            fill(self.disk)
        if trainer.step == self.free_at:
            (self.disk / "filler").unlink()


def trainer(run_dir: Path, disk: Disk, **options: Any) -> paceline.Trainer:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)  # a checkpoint is larger than what a full disk may have left
    return paceline.Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=nn.MSELoss(),
        run_dir=run_dir,
        global_batch=4,
        progress=False,
        callbacks=[disk],
        checkpoint=paceline.Checkpointing(asynchronous=False, **options),
    )


def data() -> TensorDataset:
    return TensorDataset(torch.randn(16, 64), torch.randn(16, 64))


def test_a_run_goes_on_while_the_disk_is_full(small_disk: Path) -> None:
    run = trainer(small_disk / "run", Disk(small_disk, 3, 7), every=2)
    with pytest.warns(UserWarning, match="NOT saved|cannot be written") as warned:
        history = run.fit(data(), steps=9)
    assert history.reason == "done"
    assert [s.step for s in history.steps] == list(range(1, 10)), "in memory all are known"
    told = "\n".join(str(one.message) for one in warned)
    assert "step 4: NOT saved" in told
    assert "step 6: NOT saved" in told
    found = list(events.read(small_disk / "run"))
    assert [e.step for e in found if isinstance(e, CheckpointSaved)][-2:] == [8, 9]


@pytest.mark.filterwarnings("ignore:step .* NOT saved", "ignore:the run's events cannot")
def test_a_run_whose_end_cannot_be_saved_says_what_is_lost(small_disk: Path) -> None:
    run = trainer(small_disk / "run", Disk(small_disk, 3), every=2, retry_seconds=0.0)
    with pytest.raises(NotSaved) as caught:
        run.fit(data(), steps=5)
    assert str(caught.value).startswith("step 5 is NOT saved: ")
    assert "No space left on device" in str(caught.value)
    good = small_disk / "run" / "checkpoints" / "step-000000002"
    assert str(caught.value).endswith(f"The last good state is that of step 2: {good}")
    (small_disk / "filler").unlink()
    again = trainer(small_disk / "run", Disk(small_disk, 99), every=2)
    assert again.fit(data(), steps=5, resume=True).reason == "done"


@pytest.mark.filterwarnings("ignore:step .* NOT saved", "ignore:the run's events cannot")
def test_the_last_save_is_tried_again_and_there_is_time_to_make_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_room(seconds: float) -> None:
        (small_disk / "filler").unlink(missing_ok=True)

    monkeypatch.setattr("paceline.trainer.save_schedule.time.sleep", make_room)
    run = trainer(small_disk / "run", Disk(small_disk, 1))
    assert run.fit(data(), steps=3).reason == "done"
    saved = [e for e in events.read(small_disk / "run") if isinstance(e, CheckpointSaved)]
    assert [(e.step, e.reason) for e in saved] == [(3, "end")]


@pytest.mark.filterwarnings("ignore:step .* NOT saved", "ignore:the run's events cannot")
def test_a_save_that_failed_is_tried_again_on_the_way(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.trainer.save_schedule._FIRST_RETRY_SECONDS", 0.0)
    run = trainer(small_disk / "run", Disk(small_disk, 3, 5), every=4, keep=9)
    run.fit(data(), steps=7)
    saved = [e for e in events.read(small_disk / "run") if isinstance(e, CheckpointSaved)]
    assert ("retry", 5) in [(e.reason, e.step) for e in saved] or ("retry", 6) in [
        (e.reason, e.step) for e in saved
    ]


@pytest.mark.filterwarnings("ignore:step .* NOT saved", "ignore:the run's events cannot")
def test_what_cannot_be_saved_is_kept_in_memory(small_disk: Path) -> None:
    options = {"memory_every": 2, "retry_seconds": 0.0}
    run = trainer(small_disk / "run", Disk(small_disk, 3), **options)
    with pytest.raises(NotSaved, match="A copy of step 5 is in memory"):
        run.fit(data(), steps=5)
    (small_disk / "filler").unlink()
    again = trainer(small_disk / "run", Disk(small_disk, 99), **options)
    history = again.fit(data(), steps=6, resume=True)
    assert history.reason == "done"
    tried = [e for e in events.read(small_disk / "run") if isinstance(e, events.RestoreTried)]
    assert [(e.rung, e.step) for e in tried if e.ok] == [("own memory", 5)]
