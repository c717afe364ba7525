"""A resume that is refused leaves the run as it was: plain ``--resume`` goes on as before."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline import events
from paceline.cli.train_nodes import SharedRunFolder
from paceline.config import load
from paceline.errors import RankFailed
from paceline.events import RunFinished, RunStarted, StepDone
from paceline.launch.run_choice import RunChoice
from paceline.launch.run_folder import RunFolder, open_run
from paceline.trainer import run as trainer_run

Train = Any


def settings(run: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in run.glob("*config*")}


def test_refused_by_checkpoint_check_model_and_signal(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "r"
    assert train("c.yaml", "--run-dir", "r")[0] == 0
    before = settings(run)
    assert list(before) == ["config.yaml"]

    # By the checkpoint, of a model of another shape.
    status, said = train("--resume", "r", "--set", "model.args.width=8", "--set", "train.steps=9")
    assert status == 1
    assert "the saved state is that of another model" in said
    assert "The new settings were not taken over: r/config.yaml is as it was." in said
    assert "To continue after step 5: paceline train --resume r" in said
    assert settings(run) == before
    # By the check of the config.
    assert train("--resume", "r", "--set", "train.steps=0")[0] == 2
    assert settings(run) == before
    # By the model, in the middle of its first step: the run has been announced by then.
    status, said = train(
        "--resume", "r", "--set", "model.args.fails=true", "--set", "train.steps=9"
    )
    assert (status, "not with these settings" in said) == (1, True)
    assert isinstance(list(events.read(run))[-1], RunStarted)
    assert settings(run) == before
    # By Ctrl-C before anything came of it.
    with monkeypatch.context() as patch:
        patch.setattr("paceline.launch.local.launch", lambda job: _interrupt())
        status, said = train("--resume", "r", "--set", "train.steps=9")
    assert status == 130
    assert "were not taken over" in said
    assert settings(run) == before
    # By a launcher that has the folder.
    with RunFolder(run).in_use():
        status, said = train("--resume", "r", "--set", "train.steps=9")
        assert (status, "is in use by process" in said) == (2, True)
        assert train("c.yaml", "--run-dir", "r")[0] == 2, "nor is it written over"
    assert settings(run) == before

    # After all that it is what it was, and goes on when that is wanted.
    status, said = train("--resume", "r")
    assert (status, said.splitlines()[0]) == (0, "r is already finished, at step 5.")
    assert train("--resume", "r", "--set", "train.steps=7")[0] == 0
    assert settings(run)["config-1.yaml"] == before["config.yaml"]
    assert load(run / "config.yaml").train.steps == 7
    found = list(events.read(run))
    assert [e.step for e in found if isinstance(e, StepDone)] == [1, 2, 3, 4, 5, 6, 7]
    assert sum(isinstance(e, RunFinished) for e in found) == 2
    # An override of steps is one of epochs, too.
    status, said = train("--resume", "r", "--set", "train.epochs=4")
    assert status == 0
    assert load(run / "config.yaml").train.epochs == 4
    assert load(run / "config.yaml").train.steps is None


def _interrupt() -> None:
    raise KeyboardInterrupt


def go_on(run: str, settings: str, own_folder: bool = False) -> str:
    from paceline.world import World

    mine = Path(run)
    if own_folder and World.init(device="cpu").rank == 1:
        mine = mine.parent / "elsewhere"
    with contextlib.suppress(RuntimeError):  # of the rank whose peer is gone
        trainer_run.from_config(
            load(settings), mine, resume=True, settings=Path(settings), own_folder=own_folder
        )
    return (mine / "config.yaml").read_text()


def test_all_ranks_must_have_accepted(
    train: Train, ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("c.yaml", "--run-dir", "r")[0] == 0
    before = settings(tmp_path / "r")
    text = before["config.yaml"].replace("nproc: 1", "nproc: 2").replace("dp=1", "dp=2")
    more = text.replace("steps: 5", "steps: 7")
    wrong = more.replace("args: {}", "args: {fails: true}", 1)
    assert "fails" in wrong
    (tmp_path / "wrong.yaml").write_text(wrong)
    (tmp_path / "more.yaml").write_text(more)
    with pytest.raises(RankFailed, match="not with these settings"):
        ranks(go_on, "r", "wrong.yaml", world_size=2, join=False)
    assert settings(tmp_path / "r") == before, "rank 0 had nothing against it"
    # A machine that does not share the folder has a config of its own to change.
    (tmp_path / "elsewhere").mkdir()
    found = ranks(go_on, "r", "more.yaml", False, world_size=2, join=False)
    assert found == [more, more]
    assert settings(tmp_path / "r")["config-1.yaml"] == before["config.yaml"]


def test_machines_that_meet_leave_the_settings_of_a_run_that_goes_on(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.save_config("old")
    choices = RunChoice(resume=str(tmp_path)), RunChoice(root=tmp_path / "runs")
    for choice, wanted in zip(choices, ("old", "new"), strict=True):
        with contextlib.ExitStack() as stack:
            nodes = SharedRunFolder(
                choice,
                config_text="new",
                checkpoint_where=None,
                stack=stack,
            )
            nodes.is_over = lambda: True
            nodes.make()
            assert nodes.run is not None
            assert nodes.run.config.read_text() == wanted


def test_a_trainers_run_names_the_way_to_go_on(train: Train, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    events.EventLog(tmp_path / "mine").close()
    status, said = train("--resume", "mine")
    assert status == 2
    assert "was made by a paceline.Trainer" in said
    assert "fit(..., resume=True) with run_dir='mine'" in said


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--run-dir", ""], "--run-dir '': the name is empty"),
        (["--resume", " "], "--resume ' ': the name is empty"),
        (["--run-dir", "a\nb"], r"run folder 'a\nb' has characters in its name"),
        (["--set", 'track.run_dir="a\\0b"'], r"run folder 'a\x00b"),
        (["--run-dir", "n" * 300], "cannot be made: File name too long"),
        (["--resume", "n" * 300], "File name too long"),
        (["--run-dir", "c.yaml/x"], "cannot be made: Not a directory"),
        (["--run-dir", "/proc/none"], "run folder '/proc/none' cannot be made"),
    ],
)
def test_bad_folders(train: Train, arguments: list[str], problem: str) -> None:
    config = [] if arguments[0] == "--resume" else ["c.yaml"]
    status, said = train(*config, *arguments)
    assert (status, problem in said) == (2, True)
    assert "Traceback" not in said


def test_a_disk_that_takes_nothing(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *arguments: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device", str(self))

    with monkeypatch.context() as patch:
        patch.setattr("paceline.launch.run_folder.write_private", full)
        status, said = train("c.yaml", "--run-dir", "r")
    assert status == 1
    assert "'r/config.yaml' cannot be written: No space left on device." in said
    assert "Traceback" not in said
    with monkeypatch.context() as patch:  # anything else that the system refuses
        patch.setattr("paceline.cli.train_config._launch", lambda *_, **__: full(Path("x")))
        status, said = train("c.yaml", "--run-dir", "s")
    assert (status, said.splitlines()[-1]) == (2, "x: No space left on device")
    assert open_run("s").path == Path("s")


def test_a_console_that_takes_nothing(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert train("nowhere.yaml")[0] == 2, "its own status, not that of the console"
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert train("c.yaml", "--run-dir", "q")[0] == 0
