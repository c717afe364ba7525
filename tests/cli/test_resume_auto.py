"""``--resume auto``: the same command starts a run, goes on with it, and says that it is done."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import events
from paceline.cli.train_auto import config_to_go_on_with
from paceline.cli.train_nodes import SharedRunFolder
from paceline.cli.train_request import TrainRequest
from paceline.config import dump, load, resolve
from paceline.errors import ConfigError
from paceline.events import RunFinished, StepDone
from paceline.launch.run_choice import RunChoice
from paceline.launch.run_folder import RunFolder

Train = Any
AUTO = ("c.yaml", "--run-dir", "r", "--resume", "auto")


def test_it_starts_goes_on_and_is_done(train: Train, tmp_path: Path) -> None:
    run = tmp_path / "r"
    run.mkdir()  # empty: made by a scheduler, say
    status, said = train(*AUTO, "--set", "train.steps=3")
    assert status == 0
    assert [e.step for e in events.read(run) if isinstance(e, StepDone)] == [1, 2, 3]
    status, said = train(*AUTO, "--set", "train.steps=3")
    assert (status, said.splitlines()[0]) == (0, "r is already finished, at step 3.")

    # The config was edited since: refused, and nothing is changed.
    before = (run / "config.yaml").read_text()
    status, said = train(*AUTO, "--set", "optimizer.lr=0.2", "--set", "model.args.width=5")
    assert status == 2
    assert (
        "the run in r has another config than this command: model.args.width: not set -> 5; "
        "optimizer.lr: 0.1 -> 0.2; train.steps: 3 -> 5. To go on with it as it is: paceline train "
        "--resume r; to change it: paceline train --resume r --set model.args.width=5 --set "
        "optimizer.lr=0.2 --set train.steps=5; for a new run, name another --run-dir." in said
    )
    assert (run / "config.yaml").read_text() == before

    # Two at once: one of them has it.
    with RunFolder(run).in_use():
        status, said = train(*AUTO, "--set", "train.steps=3")
    assert status == 2
    assert f"is in use by process {os.getpid()}: its run is still going on" in said

    # Killed before its first event, after some steps without any checkpoint, or before its config.
    for path in ("events.jsonl", "checkpoints"):
        subprocess.run(["rm", "-r", str(run / path)], check=True)
    assert train(*AUTO, "--set", "train.steps=3", "--set", "track.split_every=2")[0] == 0
    assert [e.step for e in events.read(run) if isinstance(e, StepDone)] == [1, 2, 3]
    assert load(run / "config.yaml").track.split_every == 2
    other = tmp_path / "early"
    (other / "checkpoints").mkdir(parents=True)
    for name in (".lock", ".config.yaml.part", ".seen-ab12", "checkpoints/.seen-ab12"):
        (other / name).touch()
    assert train("c.yaml", "--run-dir", "early", "--resume", "auto")[0] == 0
    assert any(isinstance(event, RunFinished) for event in events.read(other))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["c.yaml", "--resume", "auto"], "name the folder that the run starts in"),
        (["c.yaml", "--run-dir", "r-{date}", "--resume", "auto"], "a pattern is a new folder"),
        (["c.yaml", "--run-dir", "mine", "--resume", "auto"], "it holds 'thesis.tex'"),
        (["c.yaml", "--run-dir", "c.yaml", "--resume", "auto"], "a file is in the way"),
        (["c.yaml", "--run-dir", "fitted", "--resume", "auto"], "made by a paceline.Trainer"),
    ],
)
def test_what_is_refused(train: Train, tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    (tmp_path / "fitted").mkdir()
    (tmp_path / "fitted" / "events.jsonl").touch()
    before = sorted(tmp_path.rglob("*"))
    status, found = train(*arguments)
    assert status == 2
    assert said in found
    assert sorted(tmp_path.rglob("*")) == before


def test_it_goes_on_elsewhere_with_the_batch_it_had(tmp_path: Path) -> None:
    asked = load(None, ["launch.device=cpu", "batch={per_device_batch: 4}"])
    run = RunFolder(tmp_path)
    run.save_config(dump(resolve(asked.model_copy(update={"layout": "dp=2"}))))
    request = TrainRequest([], None, [], {}, [], None, str(tmp_path), auto=True)
    wider = load(None, ["launch.device=cpu", "batch={per_device_batch: 4}", "launch.nproc=4"])
    config = config_to_go_on_with(request, wider, run)
    assert config is not None
    assert (config.launch.nproc, config.layout) == (4, "dp=4")
    assert config.batch.global_batch == 8
    more = load(None, ["launch.device=cpu", "batch={per_device_batch: 8}", "launch.nproc=4"])
    with pytest.raises(ConfigError, match=r"batch.global_batch: 8 -> 16"):
        config_to_go_on_with(request, more, run)


def test_machines_that_meet_start_it_once_and_go_on_together(tmp_path: Path) -> None:
    """Each of them is started with the same command; the one that makes the run decides."""
    own = tmp_path / "own"
    told = []
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            first, second = (
                SharedRunFolder(
                    RunChoice(run_dir=str(tmp_path / "r"), auto=True),
                    config_text="steps: 3",
                    checkpoint_where=None,
                    stack=stack,
                )
                for _ in range(2)
            )
            run = first.make()
            second.take(run)  # it may have seen the folder that the first has just made
            assert second.run is not None
            assert second.run.config.read_text() == "steps: 3"
            told.append(run.resume)
    assert told == [False, True]
    assert not own.exists()


def test_a_script_keeps_its_folder(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("print('hello')")
    command = [sys.executable, "-m", "paceline", "train", "--script", str(script), "--nproc", "1"]
    for log in ("rank0.log", "attempt1/rank0.log"):
        arguments = ["--run-dir", "r", "--resume", "auto"]
        done = subprocess.run(
            [*command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
        assert (tmp_path / "r" / "logs" / log).read_text() == "hello\n"


def test_killed_at_any_instant_and_repeated(train: Train, tmp_path: Path) -> None:
    run = tmp_path / "r"
    arguments = (*AUTO, "--set", "checkpoint.every=2", "--set", "train.steps=6")
    command = [sys.executable, "-m", "paceline", "train", *arguments]
    chance = random.Random(7)

    def has_steps(count: int) -> bool:
        return run.is_dir() and sum(isinstance(e, StepDone) for e in events.read(run)) >= count

    instants: list[Callable[[], bool]] = [
        run.is_dir,
        lambda: (run / "config.yaml").is_file(),
        lambda: (run / "logs" / "rank0.log").is_file(),
        lambda: has_steps(3),
    ]
    for reached in instants:
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + 120
            while not reached() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(chance.random() * 0.05)
            process.send_signal(signal.SIGKILL)
        assert process.returncode in (-signal.SIGKILL, 0), "nothing but the kill ends it early"
    assert train(*arguments)[0] == 0
    assert train("c.yaml", "--run-dir", "whole", "--set", "train.steps=6")[0] == 0

    def losses(folder: Path) -> dict[int, float]:
        return {e.step: e.loss for e in events.read(folder) if isinstance(e, StepDone)}

    assert losses(run) == losses(tmp_path / "whole")
