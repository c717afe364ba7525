"""``--on slurm`` without a SLURM: states in words, when a job is requeued, what variables say."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import ConfigError, LaunchError
from paceline.events import CheckpointSaved, EventLog
from paceline.launch.engines.slurm import SlurmEngine
from paceline.launch.engines.slurm_allocation import allocation_of, launchers_of_step
from paceline.launch.engines.slurm_commands import run_command, states_of
from paceline.launch.engines.slurm_requeue import why_not
from paceline.launch.engines.submission import Submission

RUNNING = "JobId=7 JobName=a JobState=RUNNING Reason=None Restarts=1 NodeList=gpu[1-2] ExitCode=0:0"
PENDING = "JobId=7 JobName=a JobState=PENDING Reason=Resources Restarts=0 NodeList=(null)"
FORGED = "JobId=7 JobState=FAILED Reason=None ExitCode=3:0 NodeList=n1 Comment=JobState=RUNNING"
ARRAY = "\n".join(
    f"JobId={8 + index} ArrayJobId=7 ArrayTaskId={index} JobState={state} NodeList=n1 ExitCode=0:0"
    for index, state in enumerate(("COMPLETED", "RUNNING"))
)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Stands in for a command of SLURM: a script that does this."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, does: str) -> None:
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\n{does}\n")
        file.chmod(0o755)

    return make


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (RUNNING, "job 7 RUNNING on gpu[1-2], requeued once"),
        (PENDING, "job 7 PENDING (Resources)"),
        (FORGED, "job 7 FAILED (exit 3:0)"),
        (ARRAY, "job 7_0 COMPLETED, job 7_1 RUNNING on n1"),
    ],
)
def test_states_in_words(
    shown: str, said: str, command: Callable[[str, str], None], tmp_path: Path
) -> None:
    command("scontrol", f"cat <<'EOF'\n{shown}\nEOF")
    assert SlurmEngine().status(Submission("slurm", "7", tmp_path)) == said


def test_a_job_that_is_forgotten(command: Callable[[str, str], None], tmp_path: Path) -> None:
    command("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    command("sacct", "echo '7|CANCELLED by 1000|n1|0:15'")
    assert [str(state) for state in states_of("7")] == ["job 7 CANCELLED (exit 0:15)"]
    command("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    over = SlurmEngine().status(Submission("slurm", "7", tmp_path))
    assert over == "job 7 is over, and SLURM has forgotten it"


def test_a_command_that_does_not_answer(command: Callable[[str, str], None]) -> None:
    command("sbatch", "exec sleep 60")
    with pytest.raises(LaunchError, match=r"did not answer within 0\.2 s"):
        run_command(["sbatch"], seconds=0.2)


def test_a_record_that_names_no_job(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no number of a SLURM job"):
        SlurmEngine().cancel(Submission("slurm", "--all", tmp_path))


def test_requeued_while_it_gets_further(tmp_path: Path) -> None:
    def save(step: int) -> None:
        log = EventLog(tmp_path, print)
        log.write(CheckpointSaved(step=step, path="x", bytes=1, seconds=0.1, reason="stop"))
        log.close()

    assert why_not(tmp_path, 0, None) is None  # of a script, nothing is known
    (tmp_path / "config.yaml").touch()
    assert why_not(tmp_path, 0, None) is None
    assert "nothing was saved" in str(why_not(tmp_path, 1, None))
    save(5)
    assert why_not(tmp_path, 1, None) is None
    assert "nothing was saved" in str(why_not(tmp_path, 2, None))
    assert why_not(tmp_path, 2, None, preempted=True) is None
    save(6)
    assert "launch.max_preemptions is 2" in str(why_not(tmp_path, 2, 2))
    assert why_not(tmp_path, 2, 3) is None


JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "localhost,n2"}
STEP = {**JOB, "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "localhost,n2", "SLURM_PROCID": "1"}
COMMAND = ["paceline", "train", "my config.yaml"]


def test_an_allocation_is_found() -> None:
    shell = allocation_of(JOB)
    assert shell is not None
    assert (shell.nodes, shell.on_node) == (2, False)
    assert shell.rdzv.startswith("localhost:2")
    batch = allocation_of({**JOB, "SLURM_STEP_ID": "4294967291", "SLURMD_NODENAME": "n1"})
    assert batch is not None
    assert batch.on_node
    assert allocation_of(STEP) is None
    assert allocation_of({}) is None


def test_launchers_of_a_step_find_each_other() -> None:
    one_each = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
    found = {"launch.nnodes": "2", "launch.rdzv": "localhost:20771"}
    assert launchers_of_step(COMMAND, one_each) == found
    alone = {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
    assert launchers_of_step(COMMAND, alone) == {}
    assert launchers_of_step(COMMAND, JOB) == {}
    with pytest.raises(ConfigError, match=r"srun --nodes=2 --ntasks-per-node=1 paceline train 'my"):
        launchers_of_step(COMMAND, {**one_each, "SLURM_STEP_NUM_TASKS": "4"})
    with pytest.raises(ConfigError, match="SLURM_STEP_NUM_TASKS='' is no number"):
        launchers_of_step(COMMAND, STEP)


def test_a_record_does_not_have_another_job_cancelled(
    command: Callable[[str, str], None], tmp_path: Path
) -> None:
    """The folder of a run may come from anybody; what it names must be the run's own job."""
    command("scancel", "touch cancelled; exit 1")
    submission = Submission("slurm", "7", tmp_path / "run")
    command("scontrol", f"echo '{PENDING} StdOut=/home/me/other/slurm-7.out'")
    with pytest.raises(ConfigError, match=r"so it is not this run's. If it is to end: scancel 7"):
        SlurmEngine().cancel(submission)
    command("scontrol", f"echo '{PENDING} StdOut={tmp_path}/run/submission/slurm-7.out'")
    command("scancel", "exit 0")
    said = SlurmEngine().cancel(submission)
    assert said == "job 7 is cancelled; it was PENDING"
