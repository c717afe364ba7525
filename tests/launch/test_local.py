"""Ranks on this machine: what they see, what they leave, and what is said when they fail."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paceline.errors import LaunchError, RankFailed
from paceline.events import RankLost, RanksStarted, Restarting, RunFailed, read
from paceline.launch import agent
from paceline.launch.job import LocalJob
from paceline.launch.local import call, launch
from paceline.launch.rendezvous.handler import LocalRendezvous
from paceline.launch.restart_policy import RestartLimits


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


GOOD = """
import logging, os, subprocess, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
print("to stderr", file=sys.stderr)
print("arguments", sys.argv[1:], "file", __file__, "path", sys.path[0], "name", __name__)
print("threads", os.environ["OMP_NUM_THREADS"], "extra", os.environ["EXTRA"])
import beside
subprocess.Popen(["sleep", "600"])  # left behind: must not outlive the launch
"""


def test_a_script_on_two_ranks_launched_from_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)), raising=False)
    (tmp_path / "elsewhere").mkdir()
    script = write(tmp_path / "elsewhere" / "train.py", GOOD)
    write(tmp_path / "elsewhere" / "beside.py", "print('imported from beside the script')")
    shown: list[str] = []
    job = LocalJob(
        ["script", str(script), "--its", "a$$b ${local_rank}", "", "-m"],
        nproc=2,
        log_dir=tmp_path / "logs",
        events_dir=tmp_path,
        env={"EXTRA": "yes"},
        output=shown.append,
    )
    thread = threading.Thread(target=launch, args=(job,))
    thread.start()
    thread.join()
    logs = [(tmp_path / "logs" / f"rank{rank}.log").read_text() for rank in (0, 1)]
    assert logs[0].splitlines() == [
        "rank 0 of 2",
        "to stderr",
        f"arguments ['--its', 'a$$b ${{local_rank}}', '', '-m'] file {script} "
        f"path {script.parent} name __main__",
        "threads 3 extra yes",
        "imported from beside the script",
    ]
    assert logs[1].splitlines()[0] == "rank 1 of 2"
    assert "".join(shown) == logs[0], "rank 0's output, and only rank 0's, is on the console"
    assert capfd.readouterr() == ("", ""), "torch's agent keeps quiet"
    events = list(read(tmp_path))
    assert [type(e) for e in events] == [RanksStarted]


FLAKY = """
import os, signal, sys, time
import torch, torch.distributed as dist
from paceline.events import EventLog, StepDone
dist.init_process_group("gloo")
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
print("attempt", attempt)
value = torch.ones(1)
if rank == 0:
    log = EventLog(sys.argv[1])
    log.write(StepDone(step=attempt + 1, epoch=0, loss=1.0, lr=0.1, samples=8, seconds=0.1))
dist.all_reduce(value)
if rank == 1 and attempt == 0:
    raise ValueError("bad luck")
if rank == 1 and attempt == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(value)
assert value.item() == 4
dist.destroy_process_group()
"""


def test_failed_ranks_are_restarted_and_the_run_hears_why(tmp_path: Path) -> None:
    script = write(tmp_path / "flaky.py", FLAKY)
    shown: list[str] = []
    launch(
        LocalJob(
            ["script", str(script), str(tmp_path)],
            nproc=2,
            log_dir=tmp_path / "logs",
            limits=RestartLimits(max_restarts=3, backoff=0.1),
            events_dir=tmp_path,
            output=shown.append,
        )
    )
    assert "".join(shown) == "attempt 0\nattempt 1\nattempt 2\n"
    for folder, attempt in [("", 0), ("attempt1", 1), ("attempt2", 2)]:
        log = (tmp_path / "logs" / folder / "rank1.log").read_text()
        assert log.startswith(f"attempt {attempt}\n")
    events = list(read(tmp_path))
    assert [e.attempt for e in events if isinstance(e, RanksStarted)] == [0, 1, 2]
    lost = [e for e in events if isinstance(e, RankLost)]
    assert [(e.rank, e.cause, e.exit_code) for e in lost] == [(1, "failed", 1), (1, "failed", -9)]
    assert [e.step for e in lost] == [1, 2], "the last step that was done by then"
    assert lost[0].error == "ValueError: bad luck"
    assert lost[0].log == str(tmp_path / "logs" / "rank1.log")
    assert lost[1].error.startswith("killed by SIGKILL: often")
    again = [e for e in events if isinstance(e, Restarting)]
    assert [(e.reason, e.used, e.budget) for e in again] == [("failure", 1, 3), ("failure", 2, 3)]
    assert [e.delay for e in again] == [0.0, 0.1], "the first at once, the second after a while"
    assert again[0].detail == "rank 1 failed (ValueError: bad luck)"
    assert not any(isinstance(e, RunFailed) for e in events)


def test_torch_still_reuses_one_store_over_restarts() -> None:
    """When this fails, torch's own c10d rendezvous can replace ``LocalRendezvous``."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    handler = get_rendezvous_handler(
        RendezvousParameters("c10d", "127.0.0.1:0", "id", 1, 1, local_addr="127.0.0.1")
    )
    ports = [handler.next_rendezvous().bootstrap_store_info.master_port for _ in range(2)]
    handler.shutdown()
    assert ports[0] == ports[1]
    ours = LocalRendezvous()
    first, second = ours.next_rendezvous(), ours.next_rendezvous()
    assert first.bootstrap_store_info.master_port != second.bootstrap_store_info.master_port


BROKEN = """
import os, signal, time
import torch, torch.distributed as dist

def inner():
    raise KeyError("inner")

def outer():
    try:
        inner()
    except KeyError as error:
        raise ValueError("outer") from error

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
if rank == 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.barrier()
if rank == 1:
    outer()
if rank == 2:
    time.sleep(600)  # hears of nothing and will not be told
dist.barrier()
"""


def test_the_real_traceback_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent, "_FAILED_GRACE_SECONDS", 4.0)
    script = write(tmp_path / "broken.py", BROKEN)
    shown: list[str] = []
    with pytest.raises(RankFailed) as caught:
        launch(
            LocalJob(
                ["script", str(script)],
                nproc=3,
                log_dir=tmp_path / "logs",
                events_dir=tmp_path,
                output=shown.append,
            )
        )
    error = caught.value
    assert (error.rank, error.exit_code) == (1, 1)
    assert error.traceback.startswith(f'Traceback (most recent call last):\n  File "{script}"')
    assert error.traceback.endswith("ValueError: outer")
    assert "KeyError: 'inner'" in error.traceback, "its cause is shown as well"
    assert "worker.py" not in error.traceback
    assert "runpy" not in error.traceback
    assert error.traceback in str(error)
    assert f"Its whole log: {tmp_path / 'logs' / 'rank1.log'}" in str(error)
    # Rank 0 lost its peer: that traceback is in its log, not on the console.
    assert "".join(shown) == ""
    assert "Traceback" in (tmp_path / "logs" / "rank0.log").read_text()
    assert capfd.readouterr() == ("", "")
    (failed,) = [e for e in read(tmp_path) if isinstance(e, RunFailed)]
    assert (failed.rank, failed.error, failed.exit_code) == (1, "ValueError: outer", 1)


PLAIN_SCRIPT = """
import os, sys, threading
from paceline.errors import LaunchError, RankFailed
from paceline.launch.local import call
import helper

class Point:
    def __init__(self, x):
        self.x = x

start = Point(40)

def work():
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    value = torch.tensor(start.x)
    dist.all_reduce(value)
    dist.destroy_process_group()
    print("rank 0 speaks" if os.environ["RANK"] == "0" else "rank 1 speaks", sys.argv[1:])
    return Point(value.item() + helper.TWO)

def fail():
    raise helper.HelperError("from the function")

result = call(work, nproc=2)
assert isinstance(result, Point) and result.x == 82, result
print("result", result.x)

lock = threading.Lock()
try:
    call(lambda: lock, nproc=2)
except LaunchError as error:
    print("unsendable:", error)
try:
    call(fail, nproc=1, log_dir=__import__("pathlib").Path("logs"))
except RankFailed as error:
    print("failed:", error.traceback.splitlines()[-1])
try:
    call(lambda: sys.exit(0), nproc=1)
except LaunchError as error:
    print("no value:", error)
"""


def test_call_from_a_plain_script(tmp_path: Path) -> None:
    """No ``__main__`` guard: if a rank ran the script again, it would never end."""
    write(tmp_path / "helper.py", "TWO = 2\nclass HelperError(Exception): pass\n")
    script = write(tmp_path / "plain.py", PLAIN_SCRIPT)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, str(script), "--flag"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert done.stderr == ""
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[:2] == ["rank 0 speaks ['--flag']", "result 82"]
    assert lines[2].startswith("unsendable: what should run on the ranks cannot be sent to them:")
    assert "cannot pickle '_thread.lock' object" in lines[2]
    assert lines[3] == "failed: helper.HelperError: from the function"
    assert lines[4].startswith("no value: rank 0 left without returning a value")
    assert list(temporary.iterdir()) == [], "no temporary files are left"


@pytest.mark.parametrize("nproc", [0, -1, 1.5, True, "2"])
def test_nproc_must_be_a_positive_whole_number(nproc: object, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=f"nproc={nproc!r} must be a whole number, 1 or more"):
        call(print, nproc=nproc)  # type: ignore[arg-type]


def test_other_impossible_jobs(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="max_restarts=-1 must be 0 or more"):
        RestartLimits(max_restarts=-1)
    with pytest.raises(LaunchError, match="grace=-1 must be 0 seconds or more"):
        LocalJob(["-m", "x"], nproc=1, log_dir=tmp_path, grace=-1)
