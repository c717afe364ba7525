"""Run folders: made once, never taken twice, found again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.launch.run_folder import (
    RunFolder,
    latest_run,
    list_runs,
    new_run,
    new_run_at,
    open_run,
)


def test_folders_of_the_same_second_differ(tmp_path: Path) -> None:
    made: list[RunFolder] = []
    threads = [
        threading.Thread(target=lambda: made.append(new_run(tmp_path / "runs", "demo")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({run.path for run in made}) == 8
    assert all(run.path.name.startswith("demo-") and run.path.is_dir() for run in made)


def test_layout_of_a_run_folder(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    names = [run.config, run.events, run.logs, run.checkpoints]
    assert [p.name for p in names] == ["config.yaml", "events.jsonl", "logs", "checkpoints"]
    assert str(run) == str(tmp_path)


def test_new_run_at_takes_only_what_is_free(tmp_path: Path) -> None:
    assert new_run_at(tmp_path / "a" / "b").path.is_dir()
    (tmp_path / "empty").mkdir()
    assert new_run_at(tmp_path / "empty").path == tmp_path / "empty"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"other' is not empty.* Name a new folder"):
        new_run_at(tmp_path / "other")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"paceline train --resume .*run; or name a new folder"):
        new_run_at(tmp_path / "run")
    (tmp_path / "file").touch()
    for attempt in (lambda: new_run_at(tmp_path / "file"), lambda: new_run(tmp_path / "file", "x")):
        with pytest.raises(ConfigError, match=r"cannot be made: .*--run-dir"):
            attempt()


def test_runs_are_found_latest_first(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == []
    assert latest_run(tmp_path) is None
    for age, name in enumerate(["new", "middle", "old"]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
        (tmp_path / name / ".lock").touch()
        os.utime(tmp_path / name / "config.yaml", (1e9 - age, 1e9 - age))
    (tmp_path / "no-run").mkdir()
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "config.yaml").touch()  # its own, as paceline init writes it
    assert [run.path.name for run in list_runs(tmp_path)] == ["new", "middle", "old"]
    assert latest_run(tmp_path) == RunFolder(tmp_path / "new")


def test_open_run_says_what_is_wrong_and_what_is_near(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "config.yaml").touch()
    (tmp_path / "runs" / "a" / ".lock").touch()
    (tmp_path / "file").touch()
    assert open_run(tmp_path / "runs" / "a").path.name == "a"
    near = r"The latest run nearby is .*runs/a\."
    for path, problem in [
        ("runs/b", rf"'.*runs/b' does not exist\. {near}"),
        ("runs", rf"'.*runs' is not a run folder: it has no config.yaml\. {near}"),
        ("file", r"'.*file' is a file\."),
        ("elsewhere/x", r"'.*elsewhere/x' does not exist\.$"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            open_run(tmp_path / path)


def test_a_changed_config_keeps_the_earlier_ones(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for text in ("a", "a", "b", "c"):
        run.save_config(text)
    found = {p.name: p.read_text() for p in tmp_path.iterdir()}
    assert found == {"config.yaml": "c", "config-1.yaml": "a", "config-2.yaml": "b"}


def test_a_folder_in_use_is_refused_and_named(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from paceline.launch.run_folder import RunFolder\n"
        f"with RunFolder(Path({str(tmp_path)!r})).in_use():\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with (
            pytest.raises(ConfigError, match=f"in use by process {other.pid}"),
            RunFolder(tmp_path).in_use(),
        ):
            pass
        other.kill()
    with RunFolder(tmp_path).in_use():
        pass
