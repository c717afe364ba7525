"""``paceline.launch``: functions, scripts and configs, started from Python."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from node_cases import CONFIG, MODULE, NODE_TIMEOUT

import paceline
from paceline import events
from paceline.errors import ConfigError, LaunchError, RankFailed
from paceline.events import RunFinished, StepDone


def scaled(factor: int) -> tuple[int, int]:
    """What a rank returns: its own number would be gone with it."""
    return factor * int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])


def fails() -> None:
    raise ValueError("the third batch is cursed")


def test_a_function_returns_what_it_returned_on_rank_0() -> None:
    assert paceline.launch(scaled, 10, nproc=3) == (30, 0)
    with pytest.raises(RankFailed, match="the third batch is cursed"):
        paceline.launch(fails, nproc=1)


def test_a_script_and_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "greet.py"
    script.write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ['WORD'], flush=True)\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    run = paceline.launch(
        script, "it's", 0, nproc=1, run_dir="greeted", settings={"launch.env": {"WORD": "a b"}}
    )
    assert run.run == tmp_path / "greeted"
    assert run.status() == "no launcher"
    assert (run.run / "logs" / "rank0.log").read_text() == "[\"it's\", '0'] a b\n"
    with pytest.raises(LaunchError, match=r"no function has returned there; now: no launcher"):
        run.result()
    with pytest.raises(LaunchError, match="ended with status 3; what went wrong stands above"):
        paceline.launch(script, "", 3, nproc=1, settings={"launch.env": {"WORD": ""}})

    (tmp_path / "node_sums.py").write_text(MODULE)
    (tmp_path / "sums.yaml").write_text(CONFIG.format(steps=400, node_timeout=NODE_TIMEOUT))
    config = paceline.config.load("sums.yaml", ["train.steps=3"])
    run = paceline.launch(config, settings={"launch.nproc": 1, "train.steps": 2})
    told = list(events.read(run.run / events.FILE_NAME))
    assert [event.step for event in told if isinstance(event, StepDone)] == [1, 2]
    assert isinstance(told[-1], RunFinished)
    assert (run.run.parent, run.run.name[:5]) == (tmp_path / "runs", "sums-")


@pytest.mark.parametrize(
    ("what", "options", "problem"),
    [
        (scaled, {"on": "slrm"}, "there is no such engine; use local, ssh, slurm"),
        (scaled, {"settings": {"launch.nproc": 2}}, "takes nproc alone"),
        (3, {}, "must be a function, the path of a script or a config, or a config; got a int"),
        ({}, {"args": (1,)}, "a config takes no arguments; got 1"),
        ({}, {"settings": {"train.steps": object()}}, "cannot be written down"),
    ],
)
def test_what_cannot_be_launched(
    what: object, options: dict[str, object], problem: str, tmp_path: Path
) -> None:
    args = options.pop("args", ())
    with pytest.raises(ConfigError, match=problem):
        paceline.launch(what, *args, run_dir=tmp_path / "run", **options)  # type: ignore[misc]
