"""However a launch is ended, nothing of it stays: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.launch.process_reaper import is_running

PATIENCE = 240.0
"""Seconds to wait for what must happen: much less than a launch takes that is not ended."""

LAUNCHER = """
import sys
from pathlib import Path
from paceline.launch.job import LocalJob
from paceline.launch.local import launch
folder, mode, grace = sys.argv[1:]
job = LocalJob(["script", f"{folder}/rank.py", folder, mode], 2, Path(folder, "logs"),
               grace=float(grace))
launch(job)
"""

RANK = """
import os, signal, subprocess, sys, time
from pathlib import Path
folder, mode = sys.argv[1:]
rank = os.environ["RANK"]
# As a loader worker would be: a child in the rank's own process group.
child = subprocess.Popen(["sleep", "600"])

def save(signum, frame):
    time.sleep(0.5)
    state = "alive" if child.poll() is None else "dead"
    Path(folder, f"saved{rank}").write_text(f"{signal.Signals(signum).name}, child {state}")
    sys.exit(0)

for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, save if mode == "saves" else signal.SIG_IGN)
part = Path(folder, f"part{rank}")
part.write_text(f"{os.getpid()} {child.pid}")
part.rename(Path(folder, f"ready{rank}"))
time.sleep(600)
"""


class Launched:
    """A launcher with two ranks that are up and sleeping, each with a child."""

    def __init__(self, folder: Path, mode: str, grace: float) -> None:
        self.folder = folder
        (folder / "rank.py").write_text(RANK)
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(folder), mode, str(grace)],
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_until_up(self) -> None:
        ready = [self.folder / f"ready{rank}" for rank in (0, 1)]
        for path in ready:
            self.wait_for(path.name, path.exists)
        self.pids = [int(pid) for path in ready for pid in path.read_text().split()]
        assert all(is_running(pid) for pid in self.pids)

    def wait_for(self, what: str, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not is_there():
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            assert self.process.poll() is None, "the launcher is gone"
            time.sleep(0.02)

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)

    def end(self) -> tuple[int, str]:
        """Exit status and what was said, once the launcher and everything it started is gone."""
        _, said = self.process.communicate(timeout=PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while any(is_running(pid) for pid in self.pids):
            assert time.monotonic() < deadline, "some process is still there"
            time.sleep(0.05)
        return self.process.returncode, said

    def saved(self) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.glob("saved*"))]


@pytest.mark.parametrize(
    ("signum", "seen_by_ranks", "status"),
    [
        (signal.SIGINT, "SIGINT", -signal.SIGINT),  # KeyboardInterrupt, as from any Python program
        (signal.SIGHUP, "SIGTERM", 129),
    ],
)
def test_ranks_may_save_and_leave(
    tmp_path: Path, signum: signal.Signals, seen_by_ranks: str, status: int
) -> None:
    launched = Launched(tmp_path, "saves", grace=30)
    launched.wait_until_up()
    launched.send(signum)
    launched.send(signum)  # the echo of a wrapper, not an impatient user
    code, said = launched.end()
    assert code == status
    assert f"stopping ({signum.name}): the ranks have 30 s to save and leave" in said
    # Their loader workers were not disturbed while they did.
    assert launched.saved() == [f"{seen_by_ranks}, child alive"] * 2


def test_ranks_that_do_not_leave_are_killed_after_the_grace_period(tmp_path: Path) -> None:
    launched = Launched(tmp_path, "stubborn", grace=0.5)
    launched.wait_until_up()
    launched.send(signal.SIGTERM)
    assert launched.end()[0] == 143


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    launched = Launched(tmp_path, "stubborn", grace=600)
    launched.wait_until_up()
    launched.send(signal.SIGINT)
    assert launched.process.stderr is not None
    while "stopping (SIGINT)" not in (said := launched.process.stderr.readline()):
        assert said, "the launcher is gone"
    time.sleep(0.7)  # longer than the echo of a wrapper takes
    launched.send(signal.SIGINT)
    assert launched.end()[0] == -signal.SIGINT


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    launched = Launched(tmp_path, "stubborn", grace=600)
    launched.wait_until_up()
    launched.send(signal.SIGKILL)
    assert launched.end()[0] == -signal.SIGKILL


@pytest.mark.cold
@pytest.mark.skipif(sys.platform != "linux", reason="sees in /proc what is imported")
@pytest.mark.parametrize("stage", ["launcher imports torch", "ranks import torch"])
def test_ctrl_c_while_things_are_coming_up(tmp_path: Path, stage: str) -> None:
    launched = Launched(tmp_path, "stubborn", grace=600)
    launched.pids = []
    libraries = Path(f"/proc/{launched.process.pid}/maps")
    importing = {
        "launcher imports torch": lambda: "libtorch" in libraries.read_text(),
        "ranks import torch": (tmp_path / "logs" / "rank1.log").exists,
    }
    launched.wait_for(stage, importing[stage])
    launched.send(signal.SIGINT)
    code, _ = launched.end()
    assert code == -signal.SIGINT
    assert list(tmp_path.glob("ready*")) == [], "no rank got as far as its script"


def test_ignored_signals_stay_ignored(tmp_path: Path) -> None:
    """A background job (nohup, or & in a script) starts with SIGINT and SIGHUP ignored."""
    (tmp_path / "rank.py").write_text("print('done')")
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    code = ignore + LAUNCHER + "print('handler', signal.getsignal(signal.SIGHUP))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), "", "600"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + PATIENCE
    while not (tmp_path / "logs" / "rank1.log").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGHUP)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert said == "done\nhandler 1\n"
