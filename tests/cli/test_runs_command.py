"""``paceline runs``: states from what is on disk, filters, and folders by pattern."""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.cli.run_list import age_text
from paceline.config import Config, dump, load
from paceline.errors import ConfigError
from paceline.events import EvalDone, Event, RunFailed, append
from paceline.launch.run_choice import RunChoice
from run_events import at, finished, started, step

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def paceline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def make(folder: Path, *events: Event, tags: list[str] | None = None, config: bool = True) -> Path:
    folder.mkdir(parents=True)
    if config:
        name = folder.name
        (folder / "config.yaml").write_text(dump(load(Config(name=name, tags=tags or []))))
        (folder / ".lock").write_text("12345")
    for event in events:
        append(folder, event)
    if events:
        os.utime(folder / "events.jsonl", (events[-1].time, events[-1].time))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    now = time.time()
    runs = tmp_path / "runs"
    make(
        runs / "done",
        at(now - 90, started()),
        at(now - 80, step(6, 0.25)),
        at(now - 70, finished()),
        tags=["gpt", "a"],
    )
    failed = RunFailed(time=now - 3700, rank=0, error="x", exit_code=1)
    make(
        runs / "group" / "fails",
        at(now - 3800, started()),
        at(now - 3750, step(3)),
        failed,
        tags=["gpt"],
    )
    make(
        runs / "stopped",
        at(now - 200, started()),
        at(now - 190, step(2)),
        at(now - 180, finished("interrupted")),
    )
    # Killed; resumed after it was finished, and killed again.
    make(
        runs / "killed",
        at(now - 900, started()),
        at(now - 880, finished()),
        at(now - 870, started(6)),
        at(now - 860, step(7)),
    )
    make(runs / "mine", at(now - 600, started()), at(now - 590, step(1)), config=False)
    make(runs / "never")
    os.utime(runs / "never" / "config.yaml", (now - 5000, now - 5000))
    (runs / "notes").mkdir()
    (runs / "notes" / "config.yaml").write_text("no run: 1")
    return runs


def states(shown: str) -> dict[str, str]:
    return {run["path"].removeprefix("runs/"): run["state"] for run in json.loads(shown)}


def test_states_are_found_on_disk_and_by_the_launchers_lock(paceline: Command, root: Path) -> None:
    expected = {
        "done": "finished",
        "stopped": "interrupted",
        "mine": "interrupted",
        "killed": "interrupted",
        "group/fails": "failed",
        "never": "interrupted",
    }
    status, shown, errors = paceline("runs", "--json")
    assert (status, errors) == (0, "")
    assert states(shown) == expected
    assert list(states(shown)) == list(expected)  # latest first
    with (root / "killed" / ".lock").open() as lock, (root / "never" / ".lock").open() as other:
        fcntl.flock(lock, fcntl.LOCK_SH)  # as the launchers of several machines do
        fcntl.flock(other, fcntl.LOCK_EX)
        running = states(paceline("runs", "--json", "--state", "running")[1])
    assert running == {"killed": "running", "never": "running"}


def test_the_table_filters_and_numbers(paceline: Command, root: Path) -> None:
    append(root / "done", EvalDone(step=6, epoch=0, metrics={"loss": 0.7}, samples=9, seconds=1.0))
    (run,) = json.loads(paceline("runs", "--json", "--tag", "gpt", "--tag", "a")[1])
    assert {key: run[key] for key in ("name", "tags", "layout", "step", "total_steps")} == {
        "name": "done",
        "tags": ["gpt", "a"],
        "layout": "dp=2",
        "step": 6,
        "total_steps": 6,
    }
    assert (run["loss"], run["val_loss"]) == (0.25, 0.7)
    head, *lines = paceline("runs", "--tag", "gpt")[1].splitlines()
    assert head.split() == ["run", "state", "layout", "step", "loss", "age", "tags"]
    assert re.fullmatch(r"runs/group/fails +failed +dp=2 +3/6 +0\.5000 +1 h +gpt", lines[1])
    assert [line.split()[0] for line in lines] == ["runs/done", "runs/group/fails"]
    assert len(paceline("runs", "--name", "st*")[1].splitlines()) == 2
    assert len(paceline("runs", "runs/group")[1].splitlines()) == 2
    assert paceline("runs", "--tag", "none") == (0, "", "no such runs in runs/\n")
    assert paceline("runs", "runs/notes") == (0, "", "no runs in runs/notes/\n")
    assert paceline("runs", "nowhere")[0] == 2
    assert "must be one of running, finished" in paceline("runs", "--state", "x")[2]


def test_a_long_log_is_read_at_its_ends(paceline: Command, tmp_path: Path) -> None:
    now = time.time()
    run = make(tmp_path / "runs" / "long", at(now - 50, started()))
    line = at(now - 40, step(5)).to_json().encode() + b"\n"
    with (run / "events.jsonl").open("ab") as log:
        log.write(line * (700_000 // len(line)))
        log.write(at(now - 30, step(6, 0.125)).to_json().encode() + b"\n")
        log.write(b'{"half a line')
    (found,) = json.loads(paceline("runs", "--json")[1])
    assert (found["layout"], found["step"], found["loss"]) == ("dp=2", 6, 0.125)


def test_folders_by_pattern_are_always_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    choice = RunChoice(run_dir="out/{name}/{date}", name="gpt")
    first, second = choice.make(), choice.make()
    assert re.fullmatch(r"out/gpt/\d{8}", str(first))
    assert str(second) == f"{first}-2"
    # Another machine reports the folder it made: any time, but no other place.
    assert choice.take(str(tmp_path / "out" / "gpt" / "20200101-2")).path.name == "20200101-2"
    for path in ("out/gpt/../x", "out/other/20200101", "out/gpt/2020", "out/gpt/20200101/x"):
        with pytest.raises(ConfigError, match="no folder of that pattern"):
            choice.take(f"{tmp_path}/{path}")
    with pytest.raises(ConfigError, match=r"no \{day\}; a pattern may hold \{name\}, \{date\}"):
        RunChoice(run_dir="runs/{day}").make()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tag", "two words"], "--tag two words: tags: 'two words' cannot be a tag"),
        (["--name", "a/b"], "--name a/b: name: 'a/b' cannot name a folder"),
        (["--run-dir", "r/{day}"], "there is no {day}"),
        (["--script", "x.py", "--tag", "a"], "--tag: for configs only"),
    ],
)
def test_wrong_flags_are_named(
    paceline: Command, tmp_path: Path, arguments: list[str], message: Any
) -> None:
    (tmp_path / "x.py").write_text("print(1)\n")
    status, _, errors = paceline("train", *arguments)
    assert (status, message in errors) == (2, True), errors


def test_ages_for_people() -> None:
    assert [age_text(s) for s in (-1, 42, 61, 7300, 200_000)] == [
        "0 s",
        "42 s",
        "1 min",
        "2 h",
        "2 d",
    ]
