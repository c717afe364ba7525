"""``paceline train`` with its one rank in the process of the test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.errors import PacelineError, RankFailed
from paceline.trainer import run as trainer_run
from paceline.world import World

MODULE = """
import os
import torch

class Model(torch.nn.Module):
    def __init__(self, width=4, fails=False):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 1))
        self.fails = fails

    def forward(self, x):
        if self.fails and os.environ.get("RANK", "1") == "1":
            raise ValueError("not with these settings")
        return self.layers(x)

def data(samples=16):
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
"""

CONFIG = """
model: {target: "model_of_refused_resumes:Model"}
loss: {target: "torch.nn:MSELoss"}
data: {target: "model_of_refused_resumes:data"}
optimizer: {name: sgd, lr: 0.1}
schedule: {warmup_steps: 0}
batch: {global_batch: 8}
train: {steps: 5, clip_norm: null}
launch: {device: cpu, nproc: 1}
track: {progress: false}
"""

Train = Any


@pytest.fixture
def train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Train:
    """``paceline train ARGUMENTS`` with the one rank in this process; its status and its words."""
    (tmp_path / "model_of_refused_resumes.py").write_text(MODULE)
    (tmp_path / "c.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("paceline.config.checks.count_gpus", lambda: 0)
    World.current().close()  # the one of an earlier test of this process: a run makes its own

    def launch(job: Any) -> None:
        monkeypatch.setattr(sys, "argv", job.command[1:])
        try:
            trainer_run.main()
        except PacelineError as error:
            raise RankFailed(str(error), rank=0, exit_code=1, would_recur=True) from error
        except ValueError as error:
            raise RankFailed(str(error), rank=0, exit_code=1) from error

    monkeypatch.setattr("paceline.launch.local.launch", launch)

    def command(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", "train", *arguments])
        status = 0
        try:
            main()
        except SystemExit as leaving:
            status = int(leaving.code or 0)
        return status, "".join(capfd.readouterr())

    return command
