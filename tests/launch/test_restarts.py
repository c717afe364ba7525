"""Worlds that end before their time, on one node: what is started again, what is said of it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from paceline.errors import RankFailed
from paceline.events import GaveUp, RankLost, RanksStarted, Restarting, RunFailed, read
from paceline.launch.hang_watcher import DetectedHang, StartedRanks
from paceline.launch.job import LocalJob
from paceline.launch.local import launch
from paceline.launch.process_reaper import is_running
from paceline.launch.restart_policy import RestartLimits


def job(folder: Path, script: str, nproc: int = 1, **more: object) -> LocalJob:
    path = folder / "script.py"
    path.write_text(
        "import os, sys, time\nattempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
    )
    with path.open("a") as file:
        file.write(script)
    options = {"limits": RestartLimits(max_restarts=3, backoff=0.1), "output": None, **more}
    return LocalJob(["script", str(path)], nproc, folder / "logs", **options)  # type: ignore[arg-type]


def starts(folder: Path) -> int:
    return len(list((folder / "logs").rglob("rank0.log")))


def test_a_users_mistake_is_not_started_again(tmp_path: Path) -> None:
    script = "from paceline.errors import ConfigError\nraise ConfigError('no such thing')"
    with pytest.raises(RankFailed) as caught:
        launch(job(tmp_path, script, events_dir=tmp_path))
    assert "Not started again: ConfigError does not go away by itself." in str(caught.value)
    assert starts(tmp_path) == 1
    *_, lost, gave_up, failed = read(tmp_path)
    assert isinstance(lost, RankLost)
    assert gave_up == GaveUp(reason="ConfigError does not go away by itself", time=gave_up.time)
    assert isinstance(failed, RunFailed)


def test_an_exit_that_the_program_chose_is_not_started_again(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        launch(job(tmp_path, "sys.exit(4)"))
    assert caught.value.exit_code == 4
    assert starts(tmp_path) == 1


def test_the_same_error_again_is_given_up(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(RankFailed) as caught:
        launch(job(tmp_path, "raise ValueError('cursed')", notice=said.append))
    assert "the same error came a second time in a row: ValueError: cursed" in str(caught.value)
    assert starts(tmp_path) == 2
    assert len(said) == 1
    log = tmp_path / "logs" / "rank0.log"
    assert said[0] == (
        "rank 0 failed (ValueError: cursed); all ranks are started again, restart 1 of 3. "
        f"Its log: {log}"
    )


def test_ranks_that_save_and_leave_are_started_again_free_of_charge(tmp_path: Path) -> None:
    """As the trainer's do when one of them gets a SIGTERM."""
    script = "if attempt == 0: sys.exit(143 if os.environ['RANK'] == '0' else 75)"
    launch(
        job(tmp_path, script, nproc=2, events_dir=tmp_path, limits=RestartLimits(max_restarts=0))
    )
    again = [event for event in read(tmp_path) if isinstance(event, Restarting)]
    assert [(e.reason, e.delay, e.budget) for e in again] == [("preemption", 0.0, None)]
    assert not any(isinstance(event, RankLost) for event in read(tmp_path))
    assert starts(tmp_path) == 2


class Watcher:
    """Finds the ranks of the first world stuck."""

    def __init__(self, stuck: DetectedHang, folder: Path) -> None:
        self.stuck = stuck
        self.folder = folder
        self.worlds: list[StartedRanks] = []
        self.calls: list[str] = []

    def started(self, world: StartedRanks) -> None:
        self.worlds.append(world)
        self.calls.append("started")
        assert all(is_running(pid) for pid in world.ranks.values())
        assert world.scratch.is_dir()
        (self.folder / f"seen{len(self.worlds) - 1}").touch()

    def look(self) -> DetectedHang | None:
        return self.stuck if len(self.worlds) == 1 else None

    def ended(self) -> None:
        self.calls.append("ended")
        assert not any(is_running(pid) for pid in self.worlds[-1].ranks.values())


STUCK = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if attempt == 0: time.sleep(600)
while not os.path.exists(os.path.dirname(sys.argv[0]) + f"/seen{attempt}"): time.sleep(0.01)
"""


def test_ranks_that_hang_are_killed_and_started_again(tmp_path: Path) -> None:
    watcher = Watcher(DetectedHang("restart", "rank 1 is missing", [1], step=7), tmp_path)
    launch(job(tmp_path, STUCK, nproc=2, events_dir=tmp_path, hang_watcher=lambda: watcher))
    assert watcher.calls == ["started", "ended"] * 2
    first, second = watcher.worlds
    assert (first.world_size, first.node, list(first.ranks)) == (2, 0, [0, 1])
    assert [first.round, second.round] == [0, 1]
    assert first.port != second.port, "a store of its own for every world"
    (lost,) = [event for event in read(tmp_path) if isinstance(event, RankLost)]
    assert (lost.rank, lost.cause, lost.error, lost.step) == (1, "hang", "rank 1 is missing", 7)
    (again,) = [event for event in read(tmp_path) if isinstance(event, Restarting)]
    assert (again.reason, again.used, again.budget) == ("hang", 1, 3)


def test_a_hang_may_end_the_run(tmp_path: Path) -> None:
    watcher = Watcher(DetectedHang("stop", "rank 0 is missing", [0]), tmp_path)
    with pytest.raises(RankFailed, match=r"The run hung: rank 0 is missing") as caught:
        launch(job(tmp_path, STUCK, hang_watcher=lambda: watcher))
    assert caught.value.rank == 0
    assert "Not started again: hangs.action is stop." in str(caught.value)
    assert watcher.calls == ["started", "ended"]


def test_ranks_without_a_place_are_not_started(tmp_path: Path) -> None:
    said: list[str] = []
    script = "print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['LOCAL_WORLD_SIZE'])"
    idle = job(
        tmp_path,
        script,
        nproc=3,
        events_dir=tmp_path,
        usable_ranks=lambda n: n - 2,
        notice=said.append,
    )
    launch(idle)
    assert [p.name for p in (tmp_path / "logs").iterdir()] == ["rank0.log"]
    assert (tmp_path / "logs" / "rank0.log").read_text() == "0 1 1\n"
    (started,) = [event for event in read(tmp_path) if isinstance(event, RanksStarted)]
    assert (started.nproc, started.world_size, started.idle) == (1, 1, 2)
    assert said == ["2 ranks stand by: the layout has no place for more than 1"]


LEAVES_A_CHILD = """
import subprocess
child = subprocess.Popen(["sleep", "600"])
with open(sys.argv[0] + ".pids", "a") as file:
    file.write(f"{child.pid}\\n")
if attempt == 0:
    os.kill(os.getpid(), 9)
"""


def test_nothing_of_a_killed_rank_is_left_when_the_next_one_starts(tmp_path: Path) -> None:
    launch(job(tmp_path, LEAVES_A_CHILD))
    children = [int(pid) for pid in (tmp_path / "script.py.pids").read_text().split()]
    assert len(children) == 2
    assert not any(is_running(pid) for pid in children)


SLOW_TO_COME_BACK = "raise ValueError(os.urandom(4).hex())"  # another error each time


def test_a_stop_ends_the_wait_for_a_restart(tmp_path: Path) -> None:
    asked: list[float] = []
    said: list[str] = []

    def stop_at_the_second(message: str) -> None:
        said.append(message)
        if len(said) == 2:
            asked.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)

    patient = job(
        tmp_path, SLOW_TO_COME_BACK, limits=RestartLimits(9, backoff=50), notice=stop_at_the_second
    )
    with pytest.raises(SystemExit) as caught:
        launch(patient)
    assert caught.value.code == 143
    assert "all ranks are started again in 50 s, restart 2 of 9" in said[1]
    assert time.monotonic() - asked[0] < 45
    assert starts(tmp_path) == 2
