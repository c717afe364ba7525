"""``paceline config show|check|schema``, as a person runs them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from paceline import errors
from paceline.cli import main
from paceline.cli.screen import exit_status
from paceline.config import Config, load, resolve


@pytest.fixture(autouse=True)
def _on_a_machine_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.config.checks.count_gpus", lambda: 0)
    monkeypatch.setattr("paceline.config.resolving.count_gpus", lambda: 0)


class Terminal:
    """Runs ``paceline`` with arguments; returns exit status, output and errors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *self._capsys.readouterr()


@pytest.fixture
def paceline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(monkeypatch, capsys)


def test_show_prints_a_config_that_loads_back(paceline: Terminal) -> None:
    status, output, errors_shown = paceline("config", "show", "--set", "train.steps=7")
    assert (status, errors_shown) == (0, "")
    Path("shown.yaml").write_text(output)
    shown = load("shown.yaml")
    assert shown == resolve(load(None, ["train.steps=7"]), devices=0)
    assert (shown.layout, shown.launch.nproc) == ("dp=2", 2)


def test_show_tells_the_scaled_rate(paceline: Terminal) -> None:
    Path("c.yaml").write_text(
        "optimizer: {lr: 0.1}\nbatch: {global_batch: 64}\n"
        "schedule: {lr_scaling: linear, reference_batch: 16}\n"
    )
    status, output, _ = paceline("config", "show", "c.yaml")
    assert status == 0
    assert output.startswith("# learning rate: 0.4 after linear scaling from batch 16 to 64\n")
    Path("shown.yaml").write_text(output)
    assert load("shown.yaml") == resolve(load("c.yaml"), devices=0)


def test_show_of_a_layout_that_does_not_fit(paceline: Terminal) -> None:
    status, output, shown = paceline(
        "config", "show", "--set", "layout=dp=3", "--set", "launch.nproc=2"
    )
    assert (status, output) == (2, "")
    assert shown.startswith("layout 'dp=3' needs 3 ranks")


def test_check_says_ok_and_what_would_run(paceline: Terminal) -> None:
    status, output, shown = paceline("config", "check")
    steps, batch = Config().train.steps, Config().batch.global_batch
    assert (status, shown) == (0, "")
    assert output.startswith("ok: paceline.models.gpt:GPT on paceline.data.text:stdlib_source, ")
    assert f"{steps} steps, global batch {batch}" in output
    assert "dp=2" in output


def test_check_says_the_epochs_and_the_scaling(paceline: Terminal) -> None:
    settings = ["train.epochs=2", "schedule.lr_scaling=sqrt", "schedule.reference_batch=8",
                "batch.global_batch=32", "optimizer.lr=0.1"]  # fmt: skip
    _, output, _ = paceline("config", "check", *(f"--set={setting}" for setting in settings))
    assert "2 epochs, global batch 32, adamw, lr 0.2 (0.1 at batch 8, sqrt scaling), dp=2" in output


def test_check_says_every_problem_on_a_line_and_exits_2(paceline: Terminal) -> None:
    Path("c.yaml").write_text("train:\n  stpes: 3\noptimizer:\n  lr: fast\n")
    status, output, shown = paceline("config", "check", "c.yaml", "--set", "sed=1")
    assert (status, output) == (2, "")
    assert shown.split("\n") == [
        "c.yaml:2: unknown key 'train.stpes'; did you mean 'train.steps'?",
        "c.yaml:4: optimizer.lr must be a number above 0; got the string 'fast'",
        "--set sed=1: unknown key 'sed'; did you mean 'seed'?",
        "",
    ]


def test_check_finds_what_only_shows_together(paceline: Terminal) -> None:
    status, output, shown = paceline("config", "check", "--set", "launch.nproc=64")
    assert (status, output) == (2, "")
    assert shown == (
        "--set launch.nproc=64: batch.global_batch=32 must be at least dp=64, or some ranks get "
        "no samples\n"
    )


def test_a_layout_may_be_given_as_for_training(paceline: Terminal) -> None:
    status, output, _ = paceline("config", "show", "--layout", "dp=3")
    assert (status, "layout: dp=3\n" in output) == (0, True)
    status, _, shown = paceline("config", "check", "--layout", "dp=2,cp=2")
    assert status == 2
    assert shown.startswith("--layout dp=2,cp=2: cp=2 is not available in this version")


def test_checking_writes_nothing(paceline: Terminal, tmp_path: Path) -> None:
    paceline("config", "check")
    paceline("config", "show")
    assert list(tmp_path.iterdir()) == []


def test_schema_is_json(paceline: Terminal) -> None:
    status, output, _ = paceline("config", "schema")
    assert status == 0
    assert json.loads(output)["title"] == "Paceline config"


def test_a_mistyped_command_names_the_right_one(paceline: Terminal) -> None:
    status, _, shown = paceline("config", "shwo")
    assert status == 2
    assert "No such command 'shwo'" in shown
    assert "show" in shown


def test_no_command_prints_help(paceline: Terminal) -> None:
    _, output, shown = paceline()
    assert "Usage: paceline" in output + shown


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.ConfigError("x"), 2),
        (errors.LayoutError("x"), 2),
        (errors.DataError("x"), 2),
        (errors.MissingExtra("mlflow", "mlflow"), 2),
        (errors.LaunchError("x"), 1),
        (errors.CheckpointError("x"), 1),
        (errors.RankFailed("x", rank=0, exit_code=3), 3),
        (errors.RankFailed("x", rank=0, exit_code=-9), 137),
        (errors.RankFailed("x", rank=0, exit_code=0), 1),
    ],
)
def test_exit_status_says_whose_mistake_it_was(error: errors.PacelineError, status: int) -> None:
    assert exit_status(error) == status
