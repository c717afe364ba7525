"""Runs that save and come back, for real: killed ranks, signals, memory, two runs on one folder."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.test_train_runs import CONFIG, command, environment, steps_of, train
from paceline import events
from paceline.checkpoint import Folder
from paceline.checkpoint.memory.segment_files import folder_of, free_run
from paceline.events import CheckpointSaved, RestoreTried, StepDone

FRAGILE = """
import os, signal, time
import torch

class Model(torch.nn.Module):
    def __init__(self, pause=0.0, die_at=0):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.pause, self.die_at, self.calls = pause, die_at, 0

    def forward(self, x):
        time.sleep(self.pause)
        self.calls += self.training
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if first and self.calls == self.die_at and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x)

def data(samples=64):
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "tiny.py").write_text(FRAGILE)
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    yield tmp_path
    for run in tmp_path.glob("runs/*"):  # where a test failed, memory may be left
        free_run(run / "checkpoints")


def of_kind(run: Path, kind: type) -> list[Any]:
    return [event for event in events.read(run) if isinstance(event, kind)]


def test_killed_rank_goes_on_from_memory(folder: Path) -> None:
    whole = train(folder, "tiny.yaml", "--set", "name=whole")
    assert whole.returncode == 0, whole.stderr
    done = train(
        folder, "tiny.yaml", "--set", "model.args.die_at=8", "--set", "checkpoint.memory_every=1",
        "--set", "checkpoint.every=5", "--set", "launch.max_restarts=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = (folder / "runs").glob("tiny-*")
    tried = [(t.rung, t.step, t.ok) for t in of_kind(run, RestoreTried)]
    # The seventh snapshot may have been on its way when the rank died in the eighth step.
    assert tried[-1] in [("own memory", 7, True), ("own memory", 6, True)]
    assert "resuming from own memory, step" in done.stdout
    (reference,) = (folder / "runs").glob("whole-*")
    losses = {s.step: s.loss for s in of_kind(run, StepDone)}
    assert losses == {s.step: s.loss for s in of_kind(reference, StepDone)}
    assert not folder_of(run / "checkpoints").exists(), "what was in memory is freed"


def test_sigusr1_saves_and_goes_on_and_a_second_run_is_refused(folder: Path) -> None:
    running = subprocess.Popen(
        command(
            "tiny.yaml", "--set", "model.args.pause=0.2", "--set", "checkpoint.every=null",
            "--set", "train.steps=4000", "--run-dir", "here",
        ),
        cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        run = folder / "here"
        _wait_for(lambda: (run / "events.jsonl").exists() and steps_of(run))
        running.send_signal(signal.SIGUSR1)
        _wait_for(lambda: of_kind(run, CheckpointSaved))
        [saved] = of_kind(run, CheckpointSaved)
        assert saved.reason == "asked"
        other = train(
            folder, "tiny.yaml", "--set", f"checkpoint.where={run}/checkpoints", "--set",
            "train.steps=1",
        )  # fmt: skip
        assert other.returncode != 0
        assert "already holds the checkpoints of a run" in other.stderr
    finally:
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=240)
    assert "saved" in output
    assert saved.step in [c.step for c in Folder(run / "checkpoints").checkpoints()]


def _wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
