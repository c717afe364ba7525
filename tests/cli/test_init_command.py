"""``paceline init``: a project that is sound, that trains, and that writes over nothing."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.cli import main
from paceline.cli.init import TEMPLATES

MODULES = ("model", "data", "test_project")


def paceline(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_tests_of_a_project_pass(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "My project"
    assert paceline(monkeypatch, "init", str(project), "--template", template) == 0
    assert "name: My-project\n" in (project / "config.yaml").read_text()
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [str(project), *sys.path])
    for name in MODULES:  # other tests have modules of such names
        monkeypatch.delitem(sys.modules, name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # beside other tests, a second one only waits
    try:
        tests = importlib.import_module("test_project")
        tests.test_the_config_is_sound()
        tests.test_the_model_learns_one_batch()
    finally:
        torch.set_num_threads(threads)
        for name in MODULES:
            sys.modules.pop(name, None)


def test_two_commands_to_a_trained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert paceline(monkeypatch, "init", "my-project") == 0
    less = ["--set", "data.args.rows=600", "--set", "train.epochs=2", "--nproc", "1"]
    named = ["--name", "first", "--tag", "try", "--run-dir", "runs/{name}"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "train", "my-project/config.yaml", *less, *named],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "validation accuracy" in done.stdout
    table = (tmp_path / "runs" / "first" / "metrics.csv").read_text()
    assert table.startswith("step,time,train/loss")
    assert "validation/accuracy" in table.partition("\n")[0]
    listed = subprocess.run(
        [sys.executable, "-m", "paceline", "runs", "--tag", "try", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    (run,) = json.loads(listed.stdout)
    assert (run["name"], run["state"], run["step"]) == ("first", "finished", 16)


def test_nothing_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.py").write_text("mine\n")
    assert paceline(monkeypatch, "init", str(tmp_path)) == 2
    assert "already holds data.py" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["data.py"]
    assert paceline(monkeypatch, "init", str(tmp_path / "data.py")) == 2
    assert "is a file. Name a folder" in capsys.readouterr().err
    assert paceline(monkeypatch, "init", str(tmp_path / "new"), "--template", "audio") == 2
    assert "there are tabular, image, text" in capsys.readouterr().err
