"""A few faults of each kind in a row: the run ends where it would have ended without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.testing.hosts import hosts_available

CHAOS = Path(__file__).parents[1] / "benchmarks" / "chaos.py"

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(hosts_available() is not None, reason=str(hosts_available())),
    pytest.mark.timeout(900),  # some forty starts of torch, on whatever else the machine does
]


def chaos(tmp_path: Path, *arguments: str) -> dict:
    report = tmp_path / "chaos.json"
    # It would start itself again this way, to have mounts of its own.
    command = ["unshare", "--mount", sys.executable, CHAOS, *arguments]
    done = subprocess.run(
        [*command, "--keep", tmp_path / "runs", "--json", report],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PACELINE_BENCH_OWN_MOUNTS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(report.read_text())


def test_a_run_on_two_hosts_survives_whatever_dies_equal_to_the_bit(tmp_path):
    kinds = ["kill rank", "kill launcher", "cut link", "full disk", "damage", "preempt"]
    only = [word for kind in kinds for word in ("--only", kind)]
    found = chaos(tmp_path, "--faults", "6", "--part", "fixed", "--pause", "0.3", *only)
    outcomes = found["fixed"]["outcomes"]
    assert sorted(outcome["kind"] for outcome in outcomes) == sorted(kinds)
    assert found["fixed"]["equal"]
    for outcome in outcomes:
        if outcome["kind"] != "damage":  # which leaves nothing but an older checkpoint
            assert outcome["repeated"] <= 1, outcome
        assert outcome["restarted"] == (outcome["kind"] != "full disk")
    assert found["left_over"] == []
