"""Two hosts with two ranks each and a slow link between them: a run chooses, tells, and goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline import events
from paceline.events import Note, StepDone
from paceline.testing.hosts import Hosts, hosts_available

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(hosts_available() is not None, reason=str(hosts_available())),
    pytest.mark.timeout(900),
]
CONFIG = """
name: linked
model: {target: "paceline.models:GPT", args: {vocab_size: 64, context: 8, layers: 2, width: 64}}
loss: {target: "paceline.models:token_cross_entropy"}
data: {target: "linked_text:Text"}
optimizer: {name: sgd, lr: 0.1}
schedule: {name: constant, warmup_steps: 0}
batch: {global_batch: 8}
train: {steps: 6}
checkpoint: {every: 3}
track: {split_every: null}
launch: {device: cpu, nproc: 2, standby: false}
"""
MODULE = """
import torch
from torch.utils.data import Dataset


class Text(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(0, 64, (9,), generator=torch.Generator().manual_seed(index))
        return tokens[:-1], tokens[1:]
"""


def train(folder: Path, hosts: Hosts, *arguments: str) -> tuple[list[str], list[StepDone]]:
    """The notes of a run, and its steps."""
    command = [sys.executable, "-m", "paceline", "train", "--nnodes", "2"]
    command += ["--rdzv", f"{hosts[0].address}:29400", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {
        "cwd": folder, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT,
        "text": True,
    }  # fmt: skip
    launchers = [host.popen(command, **options) for host in hosts]
    said = [launcher.communicate(timeout=300)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n".join(said)
    (log,) = folder.glob("runs/*/events.jsonl")
    told = list(events.read(log))
    notes = [event.message for event in told if isinstance(event, Note)]
    return notes, [event for event in told if isinstance(event, StepDone)]


def test_a_run_chooses_by_itself_tells_and_keeps_to_it(tmp_path: Path) -> None:
    (tmp_path / "linked.yaml").write_text(CONFIG)
    (tmp_path / "linked_text.py").write_text(MODULE)
    with Hosts(2) as hosts:
        hosts[0].rate(100)
        notes, steps = train(tmp_path, hosts, "linked.yaml")
        assert [event.step for event in steps] == [1, 2, 3, 4, 5, 6]
        (chosen,) = [note for note in notes if "gradients are summed" in note]
        assert "as measured (2 nodes with 2 ranks each)" in chosen
        (run,) = tmp_path.glob("runs/*")
        notes, steps = train(tmp_path, hosts, "--resume", str(run), "--set", "train.steps=8")
        assert [event.step for event in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
        again = [note for note in notes if "gradients are summed" in note]
        assert again == [chosen], "the resumed run has the choice in its checkpoint"
