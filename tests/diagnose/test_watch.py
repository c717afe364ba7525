"""The watch over real ranks: each way of being stuck is named, and its end is noticed."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from paceline.diagnose.hangs.coordinator import HangEnded
from paceline.diagnose.hangs.diagnosis import HangDiagnosis
from paceline.diagnose.hangs.oversee import HangOverseer
from paceline.errors import RankFailed
from paceline.events import HangFound, read
from paceline.launch.job import LocalJob
from paceline.launch.local import launch

pytestmark = pytest.mark.waits

STAGES = Path(__file__).with_name("stages.py")


class Letting(HangOverseer):
    """Keeps what is told, and lets the program go on after each finding."""

    def __init__(self, lets_go: dict[str, Callable[[], object]]) -> None:
        super().__init__(say=None)
        self.findings: list[HangDiagnosis] = []
        self.overs: list[HangEnded] = []
        self._steps = list(lets_go.values())

    def tell(self, news: Any) -> None:
        if isinstance(news, HangDiagnosis):
            self.findings.append(news)
            if self._steps:
                self._steps.pop(0)()
        else:
            self.overs.append(news)


def job(script: Path, *arguments: str, tmp_path: Path, after: float, **options: Any) -> LocalJob:
    return LocalJob(
        command=["script", str(script), *arguments],
        nproc=2,
        log_dir=tmp_path / "logs",
        grace=1.0,
        env={"PACELINE_HANG_AFTER": str(after)},
        output=None,
        **options,
    )


def test_every_way_of_being_stuck_is_named_and_its_end_noticed(tmp_path: Path) -> None:
    lock = open(tmp_path / "lock", "w")  # noqa: SIM115 (let go by the test)
    fcntl.flock(lock, fcntl.LOCK_EX)
    overseer = Letting(
        {
            "code": (tmp_path / "code").touch,
            "data": (tmp_path / "data").touch,
            "pipe": lambda: (tmp_path / "fifo").write_text("x"),
            "stopped": lambda: os.kill(int((tmp_path / "pid").read_text()), signal.SIGCONT),
            "native": lock.close,
            "message": (tmp_path / "message").touch,
            "mismatch": (tmp_path / "mismatch").touch,
        }
    )
    launch(job(STAGES, str(tmp_path), tmp_path=tmp_path, after=2.0, hang_watcher=lambda: overseer))

    told = [(f.what, f.ranks) for f in overseer.findings]
    assert told == [
        ("code", (1,)),
        ("data", (1,)),
        ("reading", (1,)),
        ("stopped", (1,)),
        ("native", (1,)),
        ("code", (1,)),
        ("mismatch", (0, 1)),
    ], "\n\n".join(f.detail for f in overseer.findings)
    words = [
        ["all_reduce #2 [10] float32", "in wait_for", "stages.py"],
        ["all_reduce #3 [11] float32", "in data loading", "__getitem__"],
        ["all_reduce #4 [12] float32", "in pipe"],
        ["all_reduce #5 [13] float32", "is stopped"],
        ["all_reduce #6 [14] float32", "Python's interpreter", ", in native"],
        ["rank 0 is in recv from rank 1", ", in message"],
        ["rank 0 all_reduce [8] float32", "rank 1 all_reduce [8] int32"],
    ]
    for finding, wanted in zip(overseer.findings, words, strict=True):
        for text in wanted:
            assert text in finding.detail
    # The mismatch hung nothing; everything else was over when it was let go.
    assert len(overseer.overs) == 6
    assert all(over.seconds >= 2.0 for over in overseer.overs[:3])


DEADLOCK = """
    import torch, torch.distributed as dist, paceline

    world = paceline.World.init()
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    dist.barrier()
    for group in groups if world.rank == 0 else reversed(groups):
        dist.all_reduce(torch.ones(3), group=group)
"""


def test_a_deadlock_is_told_on_the_console_and_in_the_events_and_stopped(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(DEADLOCK))
    said: list[str] = []
    with pytest.raises(RankFailed) as failure:
        launch(
            job(
                script,
                tmp_path=tmp_path,
                after=1.0,  # acted upon after ten times that: no step is done yet
                hang_watcher=lambda: HangOverseer(
                    action="stop", events_dir=tmp_path, say=said.append
                ),
            )
        )
    (found,) = [event for event in read(tmp_path) if isinstance(event, HangFound)]
    assert (found.what, found.ranks, found.action) == ("deadlock", [0, 1], "stop")
    assert "rank 0 in all_reduce #1 [3] float32 of ranks 0 and 1 (gloo group '1')" in found.summary
    assert "rank 1 in all_reduce #1 [3] float32 of ranks 0 and 1 (gloo group '2')" in found.summary
    assert found.summary in said[0]
    assert "wait for each other" in str(failure.value)


LEFT = """
    import torch, torch.distributed as dist, paceline

    world = paceline.World.init()
    dist.barrier()
    if world.rank == 0:
        dist.all_reduce(torch.ones(5))
"""


def test_a_peer_that_left_is_named_in_the_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(LEFT))
    with pytest.raises(RankFailed, match=r"in all_reduce #2 \[5\] float32.*rank 1 left the run"):
        launch(job(script, tmp_path=tmp_path, after=60.0))


def test_without_a_launcher_a_rank_leads(tmp_path: Path) -> None:
    """As under torchrun: ranks watch each other, and one of them tells, on its stderr."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(DEADLOCK))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": "2",
        "PACELINE_HANG_AFTER": "1",
    }
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    ranks = []
    for rank, log in enumerate(logs):
        env = {**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with open(log, "w") as file:
            command = [sys.executable, str(script)]
            ranks.append(subprocess.Popen(command, env=env, stdout=file, stderr=file))
    try:
        deadline = time.monotonic() + 120
        while "wait for each other" not in "".join(log.read_text() for log in logs):
            assert time.monotonic() < deadline, "\n".join(log.read_text() for log in logs)
            time.sleep(0.1)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert "".join(log.read_text() for log in logs).count("wait for each other") == 1
