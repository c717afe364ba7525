"""A sample of benchmarks/checkpoint_damage.py: every kind of damage, in files of two to four ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KINDS = 14


def test_every_kind_of_damage_is_refused_and_the_step_before_is_used(tmp_path: Path) -> None:
    written = tmp_path / "damage.json"
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "benchmarks" / "checkpoint_damage.py", "--only", "Paceline"),
            *("--damages", str(2 * KINDS), "--width", "128", "--json", written),
        ],
        capture_output=True,
        text=True,
        # It sets that itself before it imports torch, which a warm start has done already.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [table] = json.loads(written.read_text())["tables"].values()
    assert table["columns"][1:] == ["done", "refused", "loaded", "step before used"]
    assert len(table["rows"]) == KINDS + 1
    for kind, *counts in table["rows"][:-1]:
        assert counts == [2, 2, 0, 2], kind
