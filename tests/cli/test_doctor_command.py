"""``paceline doctor``: table, JSON, exit status, and how it ends when it is interrupted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from left_over import left_over
from ports import free_port

SMALL = [
    "--set=model.args={vocab_size: 256, context: 8, layers: 1, heads: 2, width: 8, dropout: 0.0}",
    "--set=data.args.context=8",
]


def doctor(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", "doctor", *SMALL, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "200"},
    )


def test_one_healthy_machine(tmp_path: Path) -> None:
    done = doctor("--set=track.run_dir=new/runs", "--nproc=2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for check in ("config", "versions", "names", "speed", "folders", "disk", "memory", "limits"):
        assert f"\n{check} " in done.stdout
    assert "gloo between" in done.stdout
    assert "GPUs" in done.stdout
    assert "parameters is about" in done.stdout
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []  # nothing is left in the folder


def test_problems_come_with_fixes_and_status_1(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    arguments = ["--set=track.run_dir=file/runs", "--set=schedule.warmup_steps=500", "--json"]
    done = doctor(*arguments, "--nproc=1", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is False
    failed = {f["check"]: f for f in report["findings"] if f["level"] == "failed"}
    assert "schedule.warmup_steps=500" in failed["config"]["found"]
    assert f"{tmp_path}/file/runs cannot be written" in failed["folders"]["found"]
    assert all(finding["fix"] for finding in failed.values())
    assert report["facts"]["machines"][0]["model"]["parameters"] > 0


def test_summary_names_what_failed_first(tmp_path: Path) -> None:
    done = doctor("--nnodes=2", "--nproc=999", cwd=tmp_path)
    assert done.returncode == 1
    summary = done.stdout.partition("problem")[2]
    assert "needs launch.rdzv" in summary
    assert summary.index("failed config") < summary.index("warning cores")


def test_port_of_something_else(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as silent:
        port = silent.getsockname()[1]
        arguments = ["--nnodes=2", f"--rdzv=127.0.0.1:{port}", "--wait=5", "--nproc=1"]
        done = doctor(*arguments, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert f"127.0.0.1:{port}: something else than a doctor" in done.stdout
    assert "Give --rdzv another free port" in done.stdout


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "term"]
)
def test_interrupted_while_it_waits(number: signal.Signals, status: int, tmp_path: Path) -> None:
    port = free_port()
    tag = f"{os.getpid()}-{time.monotonic_ns()}"
    waiting = subprocess.Popen(
        [
            *(sys.executable, "-m", "paceline", "doctor", "--nnodes=2", "--nproc=1", "--wait=300"),
            f"--rdzv=127.0.0.1:{port}",
        ],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "DOCTOR_TEST": tag},
    )
    assert waiting.stderr is not None
    assert "waiting up to 300 s for 2 machines" in waiting.stderr.readline()
    _wait_until_served(port)
    waiting.send_signal(number)
    _, err = waiting.communicate(timeout=240)
    assert waiting.returncode == status, err
    assert "Traceback" not in err
    assert left_over("DOCTOR_TEST", tag) == []
    assert list(tmp_path.iterdir()) == []


def test_mistake_in_the_command(tmp_path: Path) -> None:
    done = doctor("--wait=0", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--wait 0: must be a number of seconds above 0" in done.stderr


def _wait_until_served(port: int) -> None:
    deadline = time.monotonic() + 240
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
