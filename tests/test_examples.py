"""Every example runs as its first lines say, and prints what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
LAUNCH = [sys.executable, "-m", "paceline", "train", "--script"]


def run(*command: str | Path, cwd: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=400, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Those that are started by a launcher have tests of their own below.
ALONE = sorted(
    path.name
    for path in EXAMPLES.glob("*.py")
    if path.name not in ("engine_loop.py", "prepare_loop.py", "torchrun_script.py")
)


@pytest.mark.parametrize("name", ALONE)
def test_runs_alone(name: str, tmp_path: Path) -> None:
    assert run(sys.executable, EXAMPLES / name, cwd=tmp_path).strip()


def test_torchrun_script_runs_unchanged(tmp_path: Path) -> None:
    script = EXAMPLES / "torchrun_script.py"
    assert run(*LAUNCH, script, "--nproc", "2", cwd=tmp_path).strip()


def test_engine_loop_prints_the_same_losses_on_two_ranks(tmp_path: Path) -> None:
    alone = run(sys.executable, EXAMPLES / "engine_loop.py", cwd=tmp_path)
    together = run(*LAUNCH, EXAMPLES / "engine_loop.py", "--nproc", "2", cwd=tmp_path)
    losses = [line for line in together.splitlines() if line.startswith("step ")]
    # The printed digits are few enough for the order of sums not to show.
    assert losses == [line for line in alone.splitlines() if line.startswith("step ")]
    assert len(losses) == 4


def test_prepare_loop_on_three_ranks_learns(tmp_path: Path) -> None:
    output = run(*LAUNCH, EXAMPLES / "prepare_loop.py", "--nproc", "3", cwd=tmp_path)
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("epoch")]
    assert len(losses) == 3
    assert losses[-1] < 0.45  # 0.69 is a coin toss
