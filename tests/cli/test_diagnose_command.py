"""``paceline diagnose``: from folders on disk, and on a run whose rank was killed."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diagnose.made_up_runs import MadeUpRun
from paceline.cli.app import app
from paceline.diagnose.story import of_run
from paceline.errors import ConfigError
from paceline.events import FILE_NAME


def write_run(folder: Path, made: MadeUpRun, *, config: bool = True) -> Path:
    folder.mkdir(parents=True)
    lines = [event.to_json() for event in made.events]
    (folder / FILE_NAME).write_text("\n".join(lines) + "\n")
    if config:
        (folder / "config.yaml").write_text("name: x\n")
    (folder / ".lock").write_text("1")  # left by a launcher that is gone
    return folder


def shown(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["diagnose", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_a_run_that_went_well(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", MadeUpRun().start().steps(100).save().finish())
    lines = shown(str(run)).splitlines()
    assert len(lines) == 3
    assert lines[0] == f"{run}: finished: 100 steps in 1:44, 8 samples/s"
    assert "saved runs/x/checkpoints/step-100" in shown(str(run), "--all")


def test_the_story_as_json(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", MadeUpRun().start().steps(5).lose().give_up("enough"))
    (run / "logs").mkdir()
    (run / "logs" / "rank1.log").write_text("std::bad_alloc\n")
    told = json.loads(shown(str(run), "--json"))
    assert told["state"] == "gave_up"
    assert told["cause"]["kind"] == "memory"
    assert told["cause"]["log"] == str(run / "logs" / "rank1.log")
    assert told["costs"]["by_kind"]["failure"]["faults"] == 1
    assert told["resume"] == f"paceline train --resume {run}"
    assert [c["kind"] for c in told["chapters"]][-2:] == ["RankLost", "GaveUp"]


def test_without_a_name_it_is_the_latest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no run in runs/"):
        of_run()
    for number in (1, 2):
        run = write_run(tmp_path / "runs" / f"r{number}", MadeUpRun().start().steps(5).finish())
        os.utime(run / "config.yaml", (number, number))
    assert shown().startswith("runs/r2: finished: 5 steps")
    monkeypatch.chdir(tmp_path / "runs" / "r1")
    assert of_run().run == ".", "inside a run folder it is that one"


def test_the_events_file_will_do_for_its_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", MadeUpRun().start().steps(5).finish())
    assert of_run(run / FILE_NAME).run == str(run)


def test_a_trainers_run_without_a_config_cannot_be_resumed_by_command(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", MadeUpRun().start().steps(5).lose().give_up(), config=False)
    assert of_run(run).resume == ""


# Folders that hold no story.


def test_what_is_no_run_is_refused_with_what_to_do(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    run = write_run(runs / "good", MadeUpRun().start().steps(5).finish())
    (tmp_path / "file").touch()
    (runs / "script" / "logs").mkdir(parents=True)
    (runs / "nothing").mkdir()
    for path, message in (
        (tmp_path / "none", rf"does not exist\. The latest run nearby is {re.escape(str(run))}"),
        (tmp_path / "file", "is a file, not a run folder"),
        (runs, rf"has no events\.jsonl\. The latest run nearby is {re.escape(str(run))}"),
        (runs / "nothing", "is not a run folder"),
        (runs / "script", rf"script's own.*Its logs are in {re.escape(str(runs))}/script/logs"),
    ):
        with pytest.raises(ConfigError, match=message):
            of_run(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('{"kind": "StepDone", "st\n\x00\x01\n', "none of its 2 lines can be read"),
        ('{"kind": "FromTheFuture", "x": 1}\n', "another version of paceline only .FromTheFuture"),
        ('{"kind": "RankLost"}\n', "another version of paceline only .RankLost"),
    ],
)
def test_events_that_cannot_be_read(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    with pytest.raises(ConfigError, match=message):
        of_run(tmp_path)


def test_a_few_broken_lines_are_said_and_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", MadeUpRun().start().steps(5).finish())
    with open(run / FILE_NAME, "a") as file:
        file.write('{"kind": "StepDone", "st\n{"kind": "FromTheFuture"}\n')
    lines = shown(str(run)).splitlines()
    assert lines[0].endswith("samples/s")
    assert re.search(r"note: 1 line is broken in .*events\.jsonl", lines[1])
    assert re.search(r"note: this version .* not know all records.*FromTheFuture", lines[2])


def test_errors_are_one_line_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "diagnose", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "is not a run folder" in done.stderr


# Whether it still runs.


@pytest.mark.parametrize("kind", [fcntl.LOCK_EX, fcntl.LOCK_SH], ids=["one", "several"])
def test_a_run_whose_folder_is_held_is_running(tmp_path: Path, kind: int) -> None:
    run = write_run(tmp_path / "r", MadeUpRun().start().steps(5))
    assert of_run(run).state == "cut_off"
    with open(run / ".lock") as lock:
        fcntl.flock(lock, kind)
        assert of_run(run).state == "running"
        assert "is running, at step 5 of 100" in shown(str(run))
    assert of_run(run).state == "cut_off"


def test_a_run_that_no_launcher_holds_runs_while_its_events_grow(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", MadeUpRun().start().steps(5))
    (run / ".lock").unlink()
    assert of_run(run).state == "running"
    long_ago = time.time() - 3600
    os.utime(run / FILE_NAME, (long_ago, long_ago))
    assert of_run(run).state == "cut_off"
    done = write_run(tmp_path / "done", MadeUpRun().start().steps(5).finish())
    (done / ".lock").unlink()
    assert of_run(done).state == "done", "it has an end, however fresh"


# A real one.

TINY = """
import torch
from paceline.testing import FaultPlan, kill_at

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.calls = 0
        self.faults = FaultPlan(kill_at(rank=1, step=9))

    def forward(self, x):
        self.calls += 1
        self.faults.reach(self.calls)
        return self.layer(x)

def data():
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), None
"""

CONFIG = """
name: tiny
model: {target: "tiny:Model"}
loss: {target: "torch.nn:MSELoss"}
data: {target: "tiny:data"}
optimizer: {name: sgd, lr: 0.1}
schedule: {warmup_steps: 0}
batch: {global_batch: 8}
train: {steps: 20, clip_norm: null}
checkpoint: {every: 5, asynchronous: false}
launch: {device: cpu, standby: false}
"""


def test_a_rank_that_was_killed_is_named(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    run = tmp_path / "run"
    arguments = ["train", "tiny.yaml", "--nproc", "2", "--run-dir", str(run)]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = of_run(run)
    assert told.state == "done"
    assert told.faults == ["failure"]
    assert told.cause is not None
    assert (told.cause.kind, told.cause.rank, told.cause.step) == ("memory", 1, 8)
    assert told.cause.text.startswith(f"Rank 1 on {platform.node()} was killed by SIGKILL after")
    assert Path(told.cause.log) == run / "logs" / "rank1.log"
    loss = told.costs.by_kind["failure"]
    assert 0 < loss.seconds < told.costs.total
    assert (loss.faults, loss.repeated) == (1, 3), "it went on from the checkpoint of step 5"
    text = shown(str(run))
    assert "finished: 20 steps" in text
    assert "in spite of 1 interruption" in text
    assert re.search(r"all ranks are started again.*failure, restart 1 of 3", text)
    assert "resuming from checkpoint, step 5" in text
