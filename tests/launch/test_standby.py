"""Processes that stand by for a restart: used, alike to ranks started cold, and never left over."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.launch import agent, processes
from paceline.launch.job import LocalJob
from paceline.launch.local import launch
from paceline.launch.process_reaper import is_running
from paceline.launch.processes import Starter
from paceline.launch.restart_policy import RestartLimits

pytestmark = pytest.mark.cold


def wait_for(what: str, condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 400  # it loads at a low priority
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)
    return found


# Says what it sees of itself, then waits to be killed; the third start is let go.
SCRIPT = """
import json, os, signal, sys, threading, time
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
its_own = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE", "PACELINE_LOG_FILE")
places = {name: os.environ[name] for name in its_own}
seen = {
    "path": sys.path, "argv": sys.argv, "orig_argv": sys.orig_argv, "name": __name__,
    "cwd": os.getcwd(), "nice": os.nice(0), "threads": threading.active_count(),
    "env": {k: v for k, v in os.environ.items() if k not in (*its_own, "MASTER_PORT")},
    "signals": [str(signal.getsignal(s)) for s in (1, 2, 10, 12, 15)],
    "modules": sorted(sys.modules), "stdin": os.readlink("/proc/self/fd/0"),
    "streams": [os.readlink(f"/proc/self/fd/{fd}") == places["PACELINE_LOG_FILE"] for fd in (1, 2)],
    "sockets": sum("socket" in os.readlink(f"/proc/self/fd/{fd}")
                   for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
}
part = f"{sys.argv[1]}/part"
with open(part, "w") as file:
    json.dump({"pid": os.getpid(), "seen": seen}, file)
os.rename(part, f"{sys.argv[1]}/seen{attempt}.json")
print("up")
if attempt != "2":
    time.sleep(600)
"""


def test_a_standby_becomes_a_rank_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_STANDBY_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(agent, "_MOVING_SECONDS", 0.0)
    starters: list[Starter] = []

    class Seen(Starter):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            starters.append(self)

    monkeypatch.setattr(processes, "Starter", Seen)
    (tmp_path / "script.py").write_text(SCRIPT)
    job = LocalJob(
        ["script", str(tmp_path / "script.py"), str(tmp_path)],
        nproc=1,
        log_dir=tmp_path / "logs",
        limits=RestartLimits(max_restarts=5, backoff=0),
        env={"OMP_NUM_THREADS": "1"},
        standby=True,
        output=None,
        notice=lambda message: None,
    )
    thread = threading.Thread(target=launch, args=(job,))
    thread.start()

    def rank(attempt: int) -> dict[str, Any]:
        path = tmp_path / f"seen{attempt}.json"
        wait_for(f"start {attempt}", path.exists)
        return dict(json.loads(path.read_text()))

    cold = rank(0)
    (standby,) = wait_for("a standby", lambda: starters[0].standbys)
    assert standby != cold["pid"]
    os.kill(cold["pid"], signal.SIGKILL)
    warm = rank(1)
    assert warm["pid"] == standby, "the next rank is the process that stood by"
    assert warm["seen"] == cold["seen"], "and cannot be told from one that was just started"
    assert (tmp_path / "logs" / "attempt1" / "rank0.log").read_text() == "up\n"
    # One that is gone when it is needed is no loss.
    (standby,) = wait_for("another standby", lambda: starters[0].standbys)
    os.kill(standby, signal.SIGKILL)
    os.kill(warm["pid"], signal.SIGKILL)
    again = rank(2)
    assert again["pid"] != standby
    assert again["seen"] == cold["seen"]
    thread.join()


LAUNCHER = """
import sys
from pathlib import Path
from paceline.launch import agent, processes
from paceline.launch.job import LocalJob
from paceline.launch.local import launch
from paceline.launch.restart_policy import RestartLimits
processes._STANDBY_AFTER_SECONDS = agent._MOVING_SECONDS = 0.0
folder = Path(sys.argv[1])
job = LocalJob(["-m", "sleeper"], 1, folder / "logs", RestartLimits(max_restarts=1), standby=True)
launch(job)
"""


def children(pid: int) -> dict[int, str]:
    """The command lines of the processes that ``pid`` has started."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread or a process that has just ended
            for child in (task / "children").read_text().split():
                command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[int(child)] = command
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_standby_dies_with_a_killed_launcher(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text("import time; time.sleep(600)")
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)], cwd=tmp_path)

    def standbys() -> list[int]:
        return [pid for pid, line in children(launcher.pid).items() if " --standby " in line]

    standby = wait_for("a standby", standbys)[0]
    everyone = list(children(launcher.pid))
    assert len(everyone) == 3, "a rank, a standby, and the guard"
    launcher.kill()
    launcher.wait()
    wait_for("their end", lambda: not any(is_running(pid) for pid in (standby, *everyone)))


def test_what_a_run_of_the_trainer_imports_is_loaded_but_not_in_its_way() -> None:
    code = """if True:
        import os, sys
        from paceline.launch import worker
        wanted = os.nice(3)
        worker._load(["-m", "paceline.trainer.run", "runs/x"])
        print("paceline.trainer.trainer" in sys.modules, "paceline.trainer.run" in sys.modules)
        print(os.nice(0) - wanted)
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True False\n0\n", "at the priority that the launcher was started with"
