"""``paceline train`` for real: processes, signals, what is said and what is left on disk."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from paceline import events
from paceline.config import load
from paceline.events import CheckpointSaved, RankLost, RunFailed, RunFinished, RunStarted, StepDone

TINY = """
import os, time
import torch

class Model(torch.nn.Module):
    def __init__(self, pause=0.0, fail_on=None, sparse=False):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.table = torch.nn.Embedding(2, 1, sparse=True) if sparse else None
        self.pause, self.fail_on, self.calls = pause, fail_on, 0

    def forward(self, x):
        time.sleep(self.pause)
        self.calls += 1
        if self.calls == 3 and os.environ["RANK"] == str(self.fail_on):
            raise ValueError("the third batch is cursed")
        return self.layer(x)

def data(samples=64):
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(0))
    pairs = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    return pairs, torch.utils.data.Subset(pairs, range(10))
"""

CONFIG = """
name: tiny
model: {target: "tiny:Model"}
loss: {target: "torch.nn:MSELoss"}
data: {target: "tiny:data"}
optimizer: {name: sgd, lr: 0.1}
schedule: {warmup_steps: 0}
batch: {global_batch: 8}
train: {steps: 12, clip_norm: null}
launch: {device: cpu}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.py").write_text(TINY)
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from paceline.cli import main; main()", "train", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def steps_of(run: Path) -> list[int]:
    return [event.step for event in events.read(run) if isinstance(event, StepDone)]


def test_a_run_from_start_to_end(folder: Path) -> None:
    done = train(
        folder, "tiny.yaml", "--set", "track.tensorboard=true", "--set", "track.mlflow=true"
    )
    assert done.stderr == ""
    assert done.returncode == 0
    (run,) = (folder / "runs").glob("tiny-*")
    shown = Path("runs") / run.name
    lines = done.stdout.splitlines()
    assert lines[1:3] == [f"run folder: {shown}", "starting 2 ranks"]
    assert lines[3] == (
        "training 4 parameters on 2 ranks (dp=2, cpu, fp32), global batch 8, 12 steps"
    )
    assert re.search(r"\nstep 12/12: loss [\d.]+, [\d.,]+ samples/s, ETA 0:00\n", done.stdout)
    assert re.search(r"\nstep 12: validation loss [\d.]+ ", done.stdout)
    checkpoint = shown / "checkpoints" / "step-000000012"
    report = lines[lines.index("") + 1 :]
    assert re.match(r"done: 12 steps, .* samples/s", report[0])
    assert re.match(r"  train loss +[\d.]+$", report[1])
    assert re.match(r"  validation loss +[\d.]+$", report[2])
    assert report[3:5] == [f"  checkpoint       {checkpoint}", f"  run folder       {shown}"]
    assert f"paceline train --resume {shown} --set train.steps=24" in done.stdout
    assert f"tensorboard --logdir {shown}/tensorboard" in done.stdout
    assert f"mlflow ui --backend-store-uri sqlite:///{folder}/runs/mlflow.db" in done.stdout
    # What is on disk.
    assert (folder / checkpoint / "manifest.json").is_file()
    assert load(run / "config.yaml").launch.nproc == 2
    assert sorted(p.name for p in (run / "logs").iterdir()) == ["rank0.log", "rank1.log"]
    assert steps_of(run) == list(range(1, 13))
    # What the trackers have.
    losses = [e.loss for e in events.read(run) if isinstance(e, StepDone)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        board = EventAccumulator(str(run / "tensorboard"))
        board.Reload()
        assert [e.value for e in board.Scalars("train/loss")] == pytest.approx(losses)
        client = MlflowClient(tracking_uri=f"sqlite:///{folder}/runs/mlflow.db")
        state = json.loads((run / "mlflow.json").read_text())
        logged = client.get_metric_history(state["run_id"], "train/loss")
        assert [m.value for m in logged] == pytest.approx(losses)
        assert client.get_run(state["run_id"]).info.status == "FINISHED"


def test_ctrl_c_saves_and_the_printed_command_goes_on(folder: Path) -> None:
    slow = ("--set", "model.args={pause: 0.02}", "--set", "train.steps=5000")
    process = subprocess.Popen(
        command("tiny.yaml", "--run-dir", "my run", *slow),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    run = folder / "my run"
    deadline = time.monotonic() + 240
    while not (run / "events.jsonl").exists() or len(steps_of(run)) < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "stopping (SIGINT): the ranks have 15 s to save and leave" in err
    assert "Traceback" not in out + err
    last = steps_of(run)[-1]
    saved = next(e for e in events.read(run) if isinstance(e, CheckpointSaved))
    assert (saved.step, saved.reason) == (last, "stop")
    stopped, hint = out.splitlines()[-2:]
    assert stopped == f"stopped at step {last}; saved to {saved.path}"
    assert hint == f"To continue after step {last}: paceline train --resume 'my run'"

    # Go on with what was printed, to an end that is near, and on one rank instead of two.
    resume = shlex.split(hint.partition("paceline train ")[2])
    more = ("--set", f"train.steps={last + 2}", "--set", "model.args.pause=0.0", "--nproc", "1")
    done = train(folder, *resume, *more)
    assert (done.returncode, done.stderr) == (0, "")
    assert "What next:\n  train longer     paceline train --resume 'my run'" in done.stdout
    assert "see the curves" not in done.stdout, "that command would train the demo"
    assert "your own model" not in done.stdout
    assert f"{last + 2} steps; going on after step {last}" in done.stdout
    assert steps_of(run) == list(range(1, last + 3)), "every step once"
    starts = [e.world_size for e in events.read(run) if isinstance(e, RunStarted)]
    assert starts == [2, 1]
    assert load(run / "config-1.yaml").train.steps == 5000
    assert (run / "logs" / "attempt1" / "rank0.log").exists()
    # It is finished now.
    again = train(folder, *resume)
    assert again.returncode == 0
    assert again.stdout.startswith(f"my run is already finished, at step {last + 2}.")
    # It can go back all the same.
    back = train(folder, *resume, "--which", str(last))
    assert (back.returncode, back.stderr) == (0, "")
    assert f"went back to step {last}: the checkpoints of later steps are in" in back.stdout
    aside = run / "checkpoints" / "set-aside-1"
    assert [path.name for path in aside.iterdir()] == [f"step-{last + 2:09d}"]
    assert steps_of(run)[-2:] == [last + 1, last + 2]


def test_modules_beside_the_config_are_found_from_elsewhere_also_by_a_resume(folder: Path) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "tiny.py").write_text("raise RuntimeError('the wrong module')\n")
    quick = ("--nproc", "1", "--set", "train.steps=2", "--set", "launch.standby=false")
    done = train(elsewhere, "../tiny.yaml", "--run-dir", "../r", *quick)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"tiny is {folder}/tiny.py, not {elsewhere}/tiny.py" in done.stdout
    assert load(folder / "r" / "config.yaml").code == [str(folder)]
    done = train(Path("/"), "--resume", str(folder / "r"), "--set", "train.steps=3")
    assert (done.returncode, done.stderr) == (0, "")
    assert steps_of(folder / "r") == [1, 2, 3]


def test_a_failing_rank_is_shown_alone_and_restarted_if_wished(folder: Path) -> None:
    done = train(
        folder,
        *("tiny.yaml", "--max-restarts", "1", "--run-dir", "r"),
        *("--set", "model.args={fail_on: 1}", "--set", "checkpoint.every=1"),
    )
    # The checkpoint of step 2 is there, so the second start fails on its third batch: the fifth.
    assert done.returncode == 1
    assert done.stderr.startswith("Rank 1 of 2 failed: ValueError: the third batch is cursed\n")
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "Traceback" not in done.stdout
    assert "restart 1 of 1" in done.stdout
    lines = done.stderr.splitlines()
    assert lines[-2] == "Its whole log: r/logs/attempt1/rank1.log"
    assert lines[-1] == "To continue after step 4: paceline train --resume r"
    assert steps_of(folder / "r") == [1, 2, 3, 4]
    record = list(events.read(folder / "r"))
    assert isinstance(record[-1], RunFailed)
    assert not any(isinstance(event, RunFinished) for event in record)


def test_what_paceline_refuses_on_the_ranks_is_told_once(folder: Path) -> None:
    sparse = ("--set", "model.args={sparse: true}", "--set", "compress.format=int8")
    done = train(folder, "tiny.yaml", "--run-dir", "r", *sparse)
    assert done.returncode == 1
    sentence = (
        "compress: 'table' is an embedding with sparse=True, whose gradient is a list of rows "
        "already. Build it with sparse=False, or train without compression (compress.format: none)."
    )
    rank = re.match(r"Rank (\d) of 2 failed: ", done.stderr)
    assert rank is not None
    assert done.stderr == (
        f"{rank[0]}{sentence}\n\nIts whole log, with the traceback: r/logs/rank{rank[1]}.log\n"
    ), "and nothing of a resume, which would end the same way"
    assert sentence not in done.stdout
    log = (folder / "r" / "logs" / f"rank{rank[1]}.log").read_text()
    assert "Traceback (most recent call last)" in log
    lost = next(e for e in events.read(folder / "r") if isinstance(e, RankLost))
    assert lost.error.endswith(sentence), "for those who read of it later"


SCRIPT = """
import os, sys
import torch.distributed as dist
print("arguments", sys.argv[1:])
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
sys.exit(3 if os.environ["RANK"] == "1" else 0)
"""


def test_a_script_gets_its_arguments_and_hands_on_its_status(folder: Path) -> None:
    (folder / "script.py").write_text(SCRIPT)
    done = train(folder, "--script", "script.py", "--nproc", "2", "--", "--nproc", "7", "--", "x y")
    assert done.returncode == 3
    assert done.stdout == "arguments ['--nproc', '7', '--', 'x y']\n"
    assert "Rank 1 of 2 failed: exited with code 3" in done.stderr
    (log,) = (folder / "runs").glob("script-*/logs/rank1.log")
    assert log.read_text() == done.stdout


@pytest.mark.cold  # one whole run that starts as a user's does
def test_a_console_that_is_gone_is_not_the_runs_fault(folder: Path) -> None:
    """As in ``paceline train … | head -1``."""
    process = subprocess.Popen(
        command("tiny.yaml", "--run-dir", "r", "--nproc", "1"),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=240), said) == (0, b"")
    assert steps_of(folder / "r") == list(range(1, 13))


def test_a_deepspeed_config_is_not_needed_again_to_go_on(folder: Path) -> None:
    wanted = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": "auto", "warmup_num_steps": 4, "warmup_type": "linear"},
        },
        "zero_optimization": {"stage": 2},
        "steps_per_print": 10,
    }
    (folder / "ds.json").write_text(json.dumps(wanted))
    kept = [
        line for line in CONFIG.splitlines() if not line.startswith(("optim", "sched", "batch"))
    ]
    (folder / "ds.yaml").write_text("\n".join([*kept, "deepspeed: ds.json"]).replace("12", "2"))
    done = train(folder, "ds.yaml")
    assert done.returncode == 0, done.stderr
    assert "deepspeed: steps_per_print: 10: The progress bar shows every step." in done.stdout
    assert "(dp=2,zero=2, cpu, fp32), global batch 8, 2 steps" in done.stdout
    (folder / "ds.json").unlink()
    (run,) = (folder / "runs").glob("tiny-*")
    again = train(folder, "--resume", str(run), "--set", "train.steps=6")
    assert again.returncode == 0, again.stderr
    rates = [event.lr for event in events.read(run) if isinstance(event, StepDone)]
    assert rates == pytest.approx([0.0, 0.0, 0.125, 0.25, 0.375, 0.5])
