"""``paceline runs status|logs|cancel`` for runs that no engine has but this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from node_cases import Cluster, wait_for

from paceline.errors import ConfigError
from paceline.launch.engines import Submission, control_of
from paceline.launch.engines.submission import read_submission
from paceline.launch.run_folder import holder_of


def runs(cluster: Cluster, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", "runs", *arguments],
        cwd=cluster.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(cluster: Cluster, *arguments: str) -> tuple[int, str, str]:
    process = runs(cluster, *arguments)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.waits
def test_a_run_is_asked_followed_and_ended(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        environment = ["--set", "launch.env={WORD: 'two words'}"]
        (tmp_path / "node_sums.py").write_text(
            (tmp_path / "node_sums.py").read_text() + "\nprint('WORD is', os.environ['WORD'])\n"
        )
        launcher = cluster.start(arguments=["sums.yaml", "--nproc", "2", *environment])
        cluster.reaches(2)
        run = os.path.relpath(cluster.run, tmp_path)

        status, out, _ = answer(cluster, "status", run, "--json")
        told = json.loads(out)
        assert status == 0
        assert (told["state"], told["engine"], told["job"]) == (
            "running",
            "local",
            str(launcher.process.pid),
        )
        status, out, _ = answer(cluster, "logs", run, "--rank", "1")
        assert status == 0
        assert "rank 1 is here" in out
        assert "WORD is two words" in out

        followers = [
            runs(cluster, "logs", run, "--follow", *more) for more in ((), ("--rank", "1"))
        ]
        for rank, follower in enumerate(followers):
            assert follower.stdout is not None
            assert f"rank {rank} is here" in follower.stdout.readline()
        status, out, err = answer(cluster, "cancel", run)
        assert (status, err) == (0, "")
        assert out == f"process {launcher.process.pid} was told to save and leave (SIGTERM)\n"
        assert launcher.ends() == 128 + signal.SIGTERM
        for follower in followers:
            assert follower.wait(60) == 0, "the run it followed is over"
            follower.communicate()
        wait_for(lambda: holder_of(cluster.run) is None, "the folder to be free")

        status, out, _ = answer(cluster, "status", run)
        assert status == 0
        assert "interrupted" in out
        assert out.endswith("local: no launcher\n")
        status, _, err = answer(cluster, "cancel", run)
        assert (status, err) == (2, f"{run}: no launcher of this machine has this run.\n")


def test_a_number_in_the_lock_is_not_believed(tmp_path: Path) -> None:
    """Whoever can write the file cannot have another process of ours ended."""
    (tmp_path / "config.yaml").write_text("{}")
    lock = tmp_path / ".lock"
    lock.write_text(str(os.getpid()))
    assert holder_of(tmp_path) is None, "nobody holds it"
    with open(lock, "a") as file:
        holder = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); "
                "print('held', flush=True); sys.stdin.read()",
                str(lock),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        file.truncate(0)
        file.write("1")  # the process of that number has nothing to do with the folder
        file.flush()
        assert holder_of(tmp_path) is None
        file.truncate(0)
        file.write(str(holder.pid))
        file.flush()
        assert holder_of(tmp_path) == holder.pid
    holder.communicate("", timeout=30)


def test_the_record_of_a_run_that_was_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run's folder says is acted upon only where the user has handed it over himself."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("{}")
    assert read_submission(run) is None
    assert control_of(str(run))[1].engine == "local"
    ours = Submission("slurm", "17", run, {"cluster": "blue"}, 12.5)
    ours.save()
    assert read_submission(run) == ours
    assert type(control_of(str(run))[0]).__name__ == "SlurmEngine"

    file = run / "submission" / "submission.json"
    genuine = file.read_text()
    for forged in (
        genuine.replace('"17"', '"18"'),
        genuine.replace("blue", "red"),
        genuine.replace("slurm", "ray"),
        genuine.replace("slurm", "os:system"),
    ):
        file.write_text(forged)
        control, submission = control_of(str(run))
        assert "by another user, or from another machine" in control.status(submission)
        with pytest.raises(ConfigError, match="End it where it was started"):
            control.cancel(submission)
    moved = tmp_path / "moved"
    run.rename(moved)
    (moved / "submission" / "submission.json").write_text(genuine)
    assert type(control_of(str(moved))[0]).__name__ == "StrangersRuns"
    for damaged in ("", "[]", "{}", '{"engine": 1, "job": "", "details": {}, "submitted": 0}', "{"):
        (moved / "submission" / "submission.json").write_text(damaged)
        with pytest.raises(ConfigError, match="is no record of a run that was handed over"):
            control_of(str(moved))
