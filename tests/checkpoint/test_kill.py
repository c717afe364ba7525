"""A sample of benchmarks/checkpoint_kill.py: runs killed while they save, one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRIALS = 8


# Its ranks are forked: a process that was itself forked from a warm one has threads by then.
@pytest.mark.cold
def test_a_run_killed_while_saving_leaves_a_state_and_a_folder_for_the_next(tmp_path: Path) -> None:
    written = tmp_path / "kill.json"
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "benchmarks" / "checkpoint_kill.py"),
            *("--trials", str(TRIALS), "--megabytes", "4", "--json", written),
        ],
        capture_output=True,
        text=True,
        # It sets that itself before it imports torch, which a warm start has done already.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(written.read_text())
    columns = dict(zip(found["columns"], found["rows"][-1], strict=True))
    assert columns["killed"] == "all"
    assert columns["trials"] == TRIALS
    assert columns["newest state whole"] == TRIALS
    assert columns["next run starts, saves, clean"] == TRIALS
