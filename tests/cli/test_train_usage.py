"""``paceline train``: what it refuses before any process starts, and in which words."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.config import dump, load, resolve
from paceline.events import EventLog, RunFinished


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.config.checks.count_gpus", lambda: 0)
    monkeypatch.setattr("paceline.config.resolving.count_gpus", lambda: 0)


def refuse(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    def never(job: object) -> None:
        raise AssertionError("a process would have been started")

    monkeypatch.setattr("paceline.launch.local.launch", never)
    monkeypatch.setattr(sys, "argv", ["paceline", "train", *arguments])


def train(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Run the command; its status and what it wrote, which starts no process."""
    refuse(monkeypatch, *arguments)
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        (
            ["--on", "slrm"],
            [
                "--on slrm: there is no such engine; use local, ssh, slurm, kubernetes, ray, mpi",
            ],
        ),
        (
            ["--dry-run", "--apply", "--hosts", "a,b"],
            [
                "--hosts: for --on ssh and --on mpi",
                "--dry-run: for --on ssh, slurm, kubernetes, ray and mpi; paceline config show "
                "prints what a config says",
                "--apply: for --on kubernetes",
                "--apply with --dry-run: give one or the other",
            ],
        ),
        (
            ["--on", "ssh", "--resume", "r", "--which", "best"],
            [
                "--which best with --on ssh: whatever starts it again would go back again; "
                "go back on this machine first, with --on local --set train.steps=… for a few steps",
            ],
        ),
        (
            ["--script", "s.py", "c.yaml", "--layout", "dp=2", "--set", "a=b", "--resume", "r"],
            [
                "--script s.py with CONFIG c.yaml: give one or the other; arguments of the script "
                "go after --",
                "--script s.py: there is no such file",
                *(
                    f"{flag}: for configs only; the script decides for itself. Arguments of the "
                    "script go after --"
                    for flag in ("--layout dp=2", "--set a=b", "--resume r")
                ),
                "--resume r with CONFIG c.yaml: a run folder has its own config; change values of "
                "it with --set",
            ],
        ),
        (
            ["c.yaml", "--", "--its", "arg"],
            ["--its arg: arguments after -- are for a script; name it with --script FILE"],
        ),
        (["a.yaml", "b.yaml"], ["one CONFIG at most; got a.yaml, b.yaml"]),
        (
            ["--resume", "r", "--run-dir", "d"],
            ["--resume r with --run-dir d: a resumed run stays in its folder; leave --run-dir out"],
        ),
        (
            ["--which", "bset"],
            [
                "--which bset: it is best, last or the number of a step",
                "--which bset: it chooses a checkpoint of a run to go on from; name the run with "
                "--resume RUN_DIR",
            ],
        ),
        (
            ["--nproc", "99999"],
            [
                "--nproc 99999: 99999 ranks on one machine are more than 1,024, the most that are "
                "started; set launch.nproc to the number of its GPUs, or of its CPU cores",
                "--nproc 99999: batch.global_batch=32 must be at least dp=99999, or some ranks get "
                "no samples",
            ],
        ),
        (["--nprok", "2"], ["--nprok: no such option; did you mean --nproc?"]),
        (["--run_dir", "d"], ["--run_dir: no such option; did you mean --run-dir?"]),
        (
            ["c.yaml", "--batch-size=3"],
            ["--batch-size: no such option; here that is: --set batch.global_batch=32"],
        ),
        (
            ["--zebra"],
            [
                "--zebra: no such option; there are --script, --backend, --nproc, --nnodes, --rdzv, "
                "--secret-file, --layout, --on, --hosts, --hostfile, --dry-run, --apply, --set, "
                "--resume, --which, --run-dir, --name, --tag, "
                "--max-restarts, --share-gpu. Any value of the config is set by --set key=value"
            ],
        ),
        (["--script", "nowhere.py"], ["--script nowhere.py: there is no such file"]),
        (["--resume", "nowhere"], ["run folder 'nowhere' does not exist."]),
        (["c.yaml"], ["c.yaml: no such file"]),
        (
            ["--nproc", "0", "--set", "train.stepz=3", "--max-restarts", "x"],
            [
                "--nproc 0: launch.nproc must be a whole number, 1 or more, or 'auto'; got 0",
                "--max-restarts x: launch.max_restarts must be a whole number, 0 or more; got the "
                "string 'x'",
                "--set train.stepz=3: unknown key 'train.stepz'; did you mean 'train.steps'?",
            ],
        ),
        (
            ["--nproc", "2", "--layout", "dp=3"],
            [
                "--layout dp=3: layout 'dp=3' needs 3 ranks, but launch.nproc=2; make them agree, "
                "or leave one of them at auto"
            ],
        ),
    ],
)
def test_wrong_usage_is_refused_all_at_once(
    arguments: list[str],
    problems: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    status, out, err = train(monkeypatch, capsys, *arguments)
    assert (status, out) == (2, "")
    assert sorted(err.splitlines()) == sorted(problems)
    assert list(tmp_path.iterdir()) == [], "no run folder is left behind"


def test_a_script_that_has_ended_is_followed_by_its_run_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("s.py").write_text("")
    refuse(monkeypatch, "--script", "s.py", "--run-dir", "r")
    monkeypatch.setattr("paceline.launch.local.launch", lambda job: None)
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (0, ""), "standard output is the script's"
    assert err.splitlines()[-1] == "  run folder       r"


@pytest.mark.parametrize("nproc", ["0", "-1", "two", "1.5"])
def test_a_script_needs_a_whole_number_of_ranks(
    nproc: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "s.py").touch()
    status, _, err = train(monkeypatch, capsys, "--script", "s.py", f"--nproc={nproc}")
    assert status == 2
    assert f"--nproc {nproc}: launch.nproc must be a whole number, 1 or more" in err


def test_a_taken_run_folder_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.yaml").write_text("precious")
    status, _, err = train(monkeypatch, capsys, "--run-dir", "taken")
    assert status == 2
    assert "run folder 'taken' is not empty" in err
    assert "paceline train --resume taken" in err
    assert [p.name for p in (tmp_path / "taken").iterdir()] == ["config.yaml"]
    assert (tmp_path / "taken" / "config.yaml").read_text() == "precious"


@pytest.mark.parametrize("extra", ["tensorboard", "mlflow"])
def test_a_missing_extra_is_named_before_anything_is_made(
    extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    find = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == extra else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    status, _, err = train(monkeypatch, capsys, "--set", f"track.{extra}=true")
    assert status == 2
    assert err.endswith(f"is not installed; pip install 'paceline[{extra}]'\n")
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_says_so_and_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "my run"
    run.mkdir()
    (run / "config.yaml").write_text(dump(resolve(load(None, ["train.steps=50"]))))
    log = EventLog(run)
    log.write(RunFinished(reason="done", step=50, epoch=0, samples=1, seconds=1.0))
    log.close()
    refuse(monkeypatch, "--resume", "my run")
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code
    assert capsys.readouterr().out == (
        "my run is already finished, at step 50.\n"
        "To train it longer: paceline train --resume 'my run' --set train.steps=100\n"
    )


def test_ctrl_c_before_the_ranks_are_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.cli.train_config.load", interrupted)
    status, _, err = train(monkeypatch, capsys)
    assert (status, err) == (130, "interrupted before the ranks were started\n")


def test_nproc_changes_a_config_that_has_its_layout_written_out(tmp_path: Path) -> None:
    from paceline.cli.train_request import TrainRequest
    from paceline.config import dump, load, resolve

    written = tmp_path / "my.yaml"
    written.write_text(dump(resolve(load(None), devices=0)))
    for flag in ("launch.nproc=4", "layout=dp=4"):
        request = TrainRequest([str(written)], None, [], {flag: "--flag"}, [], None, None)
        request.adjust_ranks_of(load(written))
        config = resolve(request.load(str(written)), devices=0)
        assert (config.layout, config.launch.nproc) == ("dp=4", 4)


SCRIPT = "import argparse\nargparse.ArgumentParser().parse_args()\nopen('ran', 'w')\n"


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (
            ["script.py"],
            "script.py: defines no 'config' (a dict or a paceline Config); a script that trains by "
            "itself runs with: paceline train --script script.py",
        ),
        (
            ["script.py", "--lr", "3"],
            "--lr: no such option of paceline train; arguments of the script go after --, as in: "
            "paceline train --script script.py -- --lr 3",
        ),
        (
            ["--nproc", "2", "--script=script.py", "--lr=3", "x y"],
            "--lr: no such option of paceline train; arguments of the script go after --, as in: "
            "paceline train --nproc 2 --script script.py -- --lr=3 'x y'",
        ),
        (
            ["--script", "script.py", "3"],
            "--script script.py with CONFIG 3: give one or the other; arguments of the script go "
            "after --",
        ),
        (
            ["--script", "scrip.py"],
            "--script scrip.py: there is no such file; did you mean 'script.py'?",
        ),
        (
            ["--script", "folder"],
            "--script folder: is a folder without a __main__.py; name the script in it",
        ),
        (["--script", "fifo.py"], "--script fifo.py: is not a file that several ranks can read"),
        (["--script", "text.md"], "--script text.md: not valid Python, line 1: invalid syntax"),
        (
            ["--script", "c.yaml"],
            "--script c.yaml: that is a config; train it with: paceline train c.yaml",
        ),
        (["folder"], "folder: is a folder, not a config file; the configs there are a.yaml"),
        (
            ["run"],
            "run: is a folder, not a config file; go on with the run in it: paceline train --resume "
            "run; or start anew with its config: 'run/config.yaml'",
        ),
        (
            ["--resume", "c.yaml"],
            "--resume c.yaml: is a config, not the folder of a run; to start a run with it: "
            "paceline train c.yaml",
        ),
        (
            ["--resume", "run/config.yaml"],
            "--resume run/config.yaml: is a file of a run; name the run's folder: --resume run",
        ),
        (
            ["--resume", "run/logs/rank0.log"],
            "--resume run/logs/rank0.log: is a file of a run; name the run's folder: --resume run",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_was_meant_is_said(
    arguments: list[str],
    answer: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("script.py").write_text(SCRIPT)
    Path("text.md").write_text("This is no program.\n")
    Path("c.yaml").write_text("seed: 1\n")
    os.mkfifo("fifo.py")
    Path("folder").mkdir()
    Path("folder/a.yaml").write_text("seed: 1\n")
    Path("run/logs").mkdir(parents=True)
    for name in ("config.yaml", "events.jsonl", "logs/rank0.log"):
        Path("run", name).write_text("seed: 1\n")
    assert train(monkeypatch, capsys, *arguments) == (2, "", f"{answer}\n")
    assert not Path("ran").exists(), "the script was not run to find out"
