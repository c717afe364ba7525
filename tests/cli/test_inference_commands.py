"""``paceline evaluate`` and ``paceline predict``: a run's model on data, from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

import paceline
from paceline import History
from paceline.cli import main

TINY = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.first(x).tanh())

def inputs(samples=23):
    return torch.randn(samples, 3, generator=torch.Generator().manual_seed(0))

def data(samples=23):
    pairs = torch.utils.data.TensorDataset(inputs(), inputs().sum(1, keepdim=True))
    return pairs, torch.utils.data.Subset(pairs, range(10))
"""

CONFIG = """
name: tiny
model: {target: "tiny:Model"}
loss: {target: "torch.nn:MSELoss"}
data: {target: "tiny:data"}
optimizer: {name: sgd, lr: 0.05}
schedule: {warmup_steps: 0}
batch: {global_batch: 8}
train: {steps: 6, clip_norm: null, eval_every: 2}
checkpoint: {best: loss}
precision: fp64
ema: 0.5
launch: {device: cpu}
"""


def paceline_command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from paceline.cli import main; main()", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inference")
    (folder / "tiny.py").write_text(TINY)
    (folder / "tiny.yaml").write_text(CONFIG)
    done = paceline_command(folder, "train", "tiny.yaml", "--nproc", "2", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_evaluate_gives_what_the_run_measured_and_leaves_it_alone(run: Path) -> None:
    before = (run / "events.jsonl").read_bytes()
    best = History.read(run).best()
    assert best is not None
    done = paceline_command(run.parent, "evaluate", "run", "--which", "best", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["step"], told["samples"]) == (best.step, 10)
    assert told["metrics"]["loss"] == pytest.approx(best.metrics["loss"], rel=1e-12)
    assert "loss " in done.stderr  # progress stays out of the answer
    one = paceline_command(
        run.parent, "evaluate", "run", "--which", "4", "--nproc", "1", "--data", "train"
    )
    assert one.returncode == 0, one.stderr
    assert "run, 4: step 4, 23 samples of train\n  loss  " in one.stdout
    ema = paceline_command(run.parent, "evaluate", "run", "--ema", "--json", "--nproc", "1")
    assert ema.returncode == 0, ema.stderr
    measured = History.read(run).evals[-1].metrics["ema/loss"]
    assert json.loads(ema.stdout)["metrics"] == {"loss": pytest.approx(measured, rel=1e-9)}
    assert (run / "events.jsonl").read_bytes() == before


def test_predict_writes_the_same_rows_on_any_layout(run: Path) -> None:
    rows = []
    for name, more in (("a.npy", ["--nproc", "1"]), ("b.npy", ["--layout", "tp=2"])):
        done = paceline_command(
            run.parent, "predict", "run", "--out", name, "--data", "tiny:inputs", *more
        )
        assert done.returncode == 0, done.stderr
        assert (
            f"run, last: step 6, 23 samples of tiny:inputs\n  written to       {name}"
            in done.stdout
        )
        rows.append(torch.from_numpy(numpy.load(run.parent / name)))
    model = torch.nn.Module()
    model.first, model.last = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
    paceline.load_weights(model.double(), run)
    x = torch.randn(23, 3, generator=torch.Generator().manual_seed(0)).double()
    expected = model.last(model.first(x).tanh()).detach()
    for found in rows:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["evaluate", "nowhere"], "run folder 'nowhere' does not exist"),
        (["evaluate", "run", "--which", "newest"], "it is best, last or the number of a step"),
        (["predict", "run", "--out", "rows.csv"], "one of .npy, .npz, .safetensors, .jsonl"),
        (["predict", "run", "--out", "c.npy", "--data", "tiny:nothing"], "tiny:nothing"),
    ],
)
def test_what_is_refused_before_ranks_start(
    run: Path,
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(run.parent)
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    printed = capfd.readouterr()
    assert end.value.code in (1, 2)
    assert words in printed.err
    assert "starting" not in printed.out
