"""``--on slurm`` on a real SLURM of two nodes; see ``slurm_cluster.py``.

Runs there start cold and on a busy machine, so that few of them are started and each shows much.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from engines import slurm_cluster
from engines.slurm_cluster import SlurmCluster, wait_for
from node_cases import CONFIG, MODULE

from paceline import events
from paceline.config import load
from paceline.events import CheckpointSaved, RanksStarted, StepDone

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason="SLURM is not installed"),
]
STEPS = 150
"""At a second each, more than a slow run does while anything happens to it."""


class Project:
    """A folder with a small config, and commands typed in it."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        (folder / "sums.yaml").write_text(CONFIG.format(steps=STEPS, node_timeout=6.0))
        (folder / "node_sums.py").write_text(MODULE)

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(self.folder), *os.environ.get("PYTHONPATH", "").split(":")])
        return {**self.cluster.environment(), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def paceline(
        self, *words: str, before: Sequence[str] = (), **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Type a command, and wait for its end."""
        return subprocess.run(
            [*before, sys.executable, "-m", "paceline", *words],
            cwd=self.folder,
            env={**self.environment(), **env},
            capture_output=True,
            text=True,
            timeout=600,
        )

    def submit(self, run: str, *words: str) -> str:
        """``train --on slurm``; the number of the job."""
        done = self.paceline("train", "sums.yaml", "--on", "slurm", "--run-dir", run, *words)
        assert done.returncode == 0, done.stderr
        record = json.loads((self.folder / run / "submission" / "submission.json").read_text())
        assert record["engine"] == "slurm"
        return str(record["job"])

    def of(self, run: str, kind: type) -> list:
        """The events of one kind of a run."""
        path = self.folder / run / events.FILE_NAME
        return (
            [event for event in events.read(path) if isinstance(event, kind)]
            if path.exists()
            else []
        )

    def losses(self, run: str) -> dict[int, float]:
        """The loss of every step; of one that was repeated, the last."""
        return {event.step: event.loss for event in self.of(run, StepDone)}

    def saved(self, run: str) -> int:
        """The step of the newest checkpoint."""
        return int(self.of(run, CheckpointSaved)[-1].step)

    def wait_for_step(self, run: str, step: int) -> None:
        wait_for(
            lambda: any(done.step >= step for done in self.of(run, StepDone)),
            lambda: f"step {step} of {run}:\n{self.output(run)}",
        )

    def output(self, run: str) -> str:
        """What the jobs of a run have printed."""
        files = sorted((self.folder / run / "submission").glob("slurm-*.out"))
        return "\n".join(file.read_text(errors="replace") for file in files)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


@pytest.fixture
def project(cluster: SlurmCluster, tmp_path: Path) -> Project:
    return Project(cluster, tmp_path)


@pytest.fixture(scope="module")
def alone(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of two ranks on this machine, to which nothing happens."""
    project = Project(cluster, tmp_path_factory.mktemp("alone"))
    done = project.paceline("train", "sums.yaml", "--nproc", "2", "--run-dir", "alone")
    assert done.returncode == 0, done.stderr
    return project.losses("alone")


def test_time_limit_and_lost_node(project: Project, alone: dict[int, float]) -> None:
    """A run that is sent away twice goes on where it was, and computes what it would have."""
    cluster = project.cluster
    slow = project.folder / "slow"
    slow.write_text("0.25")
    options = ["launch.slurm.time=60", "launch.slurm.save_before=45", "launch.grace=20"]
    job = project.submit("run", "--nnodes", "2", *(w for o in options for w in ("--set", o)))

    project.wait_for_step("run", 2)
    said = json.loads(project.paceline("runs", "status", "run", "--json").stdout)
    assert said["says"] == f"job {job} RUNNING on n[1-2]"
    assert said["state"] == "running"

    # The limit comes near. SLURM looks every 30 s; the run saves, and its job is queued again.
    cluster.bring_time_limit_near(job)
    wait_for(lambda: cluster.job(job)["Restarts"] == "1", lambda: project.output("run"))
    left = "the time limit is near: the run saves and leaves"
    assert left in project.output("run")
    assert project.saved("run") == project.of("run", StepDone)[-1].step
    reached = len(project.of("run", StepDone))
    cluster.command("scontrol", "update", f"jobid={job}", "TimeLimit=60")
    cluster.wait_for_state(job, "RUNNING")
    wait_for(lambda: len(project.of("run", StepDone)) > reached + 1, lambda: project.output("run"))

    cluster.kill_node("n2")
    wait_for(lambda: cluster.job(job)["Restarts"] == "2", lambda: project.output("run"))
    slow.unlink()
    cluster.start_node("n2")
    assert cluster.wait_for_state(job, "COMPLETED")["ExitCode"] == "0:0"

    assert len(project.of("run", RanksStarted)) == 3, project.output("run")
    assert project.losses("run") == alone
    secret = project.folder / "run" / "submission" / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600


def test_in_an_allocation(project: Project, alone: dict[int, float]) -> None:
    """Typed in a shell of salloc, and started by the user's own srun: the same run."""
    train = [sys.executable, "-m", "paceline", "train", "sums.yaml", "--set", "train.steps=6"]
    shell = f"""
        {shlex.join([*train, "--run-dir", "typed"])} || exit 11
        srun --ntasks-per-node=1 {shlex.join([*train, "--run-dir", "started"])} || exit 12
        srun --ntasks=4 --overcommit {shlex.join([*train, "--run-dir", "many"])} && exit 13
        {shlex.join([*train, "--nnodes", "3", "--run-dir", "many"])} && exit 14
        exit 0
    """
    done = subprocess.run(
        ["salloc", "--nodes=2", "bash", "-c", shell],
        cwd=project.folder,
        env=project.environment(),
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first = {step: loss for step, loss in alone.items() if step <= 6}
    for run in ("typed", "started"):
        assert project.losses(run) == first
        (start,) = project.of(run, RanksStarted)
        assert (start.world_size, len(start.nodes)) == (2, 2)
    assert "Start one on every node: srun --nodes=2 --ntasks-per-node=1 paceline" in done.stderr
    assert re.search(r"launch\.nnodes=3, but SLURM job \d+ has 2 nodes \(n\[1-2\]\)", done.stderr)
    assert not (project.folder / "many").exists()


def test_an_array_one_of_which_is_cancelled(project: Project) -> None:
    """A run for each index, each with its own value; cancelling gives time to save."""
    slow = project.folder / "slow"
    slow.write_text("0.2")
    job = project.submit(
        "sweep",
        *("--set", "launch.slurm.array=1-2", "--set", "seed={index}"),
        *("--set", "optimizer.lr=0.0{index}"),
    )
    for index in ("1", "2"):
        project.wait_for_step(f"sweep/{index}", 2)
    said = project.paceline("runs", "status", "sweep").stdout
    assert f"job {job}_1 RUNNING" in said
    assert f"job {job}_2 RUNNING" in said
    for index in ("1", "2"):
        config = load(project.folder / "sweep" / index / "config.yaml")
        assert (config.seed, config.optimizer.lr) == (int(index), float(f"0.0{index}"))

    done = project.paceline("runs", "cancel", "sweep")
    assert "the run saves and leaves (SIGTERM)" in done.stdout, done.stderr
    wait_for(lambda: not project.cluster.command("squeue", "-h", "-j", job), "the jobs to end")
    for index in ("1", "2"):
        run = f"sweep/{index}"
        assert project.saved(run) == project.of(run, StepDone)[-1].step
    assert "CANCELLED" in project.paceline("runs", "status", "sweep").stdout
    assert "saves and leaves" not in project.output("sweep")  # no time limit, and no requeue
    again = project.paceline("runs", "cancel", "sweep")
    assert again.returncode == 2
    assert "saved to" in project.paceline("runs", "logs", "sweep").stdout


def test_what_sbatch_refuses(project: Project, tmp_path: Path) -> None:
    """In its own words with ours beside, and nothing is left that blocks a second try."""
    train = ["train", "sums.yaml", "--on", "slurm", "--nnodes", "2", "--run-dir", "refused"]
    wrong = project.paceline(*train, "--set", "launch.slurm.partition=nowhere")
    assert wrong.returncode == 1
    assert "sbatch: error: invalid partition specified: nowhere" in wrong.stderr
    assert "name one with launch.slurm.partition" in wrong.stderr
    assert not (project.folder / "refused").exists()
    feature = project.paceline(*train, "--set", "launch.slurm.constraint=a9000")
    assert feature.returncode == 1
    assert "Invalid feature specification" in feature.stderr
    assert "see launch.slurm.constraint" in feature.stderr
    unknown = project.paceline(*train, "--set", 'launch.slurm.extra=["--no-such-thing=1"]')
    assert unknown.returncode == 1
    assert "no-such-thing" in unknown.stderr
    absent = project.paceline(*train, PATH=str(tmp_path))
    assert absent.returncode == 2
    assert "there is no sbatch on this machine" in absent.stderr
    assert not (project.folder / "refused").exists()


def test_hostile_values_reach_the_job_unharmed(project: Project) -> None:
    """What a real sbatch makes of quoted values: a comment, and a folder of a nasty name."""
    comment = 'it\'s "quoted" $(touch HURT) `touch HURT` #SBATCH \\ & %j é'
    run = "a b'c$(touch HURT)#%j"
    job = project.submit(
        run,
        *("--set", f"launch.slurm.comment={json.dumps(comment)}"),
        *("--set", "launch.slurm.python=/bin/false"),
    )
    project.cluster.wait_for_state(job, "FAILED")
    assert project.cluster.command("squeue", "-h", "-t", "all", "-j", job, "-o", "%k") == comment
    assert (project.folder / run / "submission" / f"slurm-{job}.out").exists()
    assert not (project.folder / "HURT").exists()
    assert "FAILED (exit 1:0)" in project.paceline("runs", "status", run).stdout


def test_without_a_controller(project: Project) -> None:
    """Nobody waits for ever, and the error says who is not there."""
    project.cluster.stop_controller()
    try:
        done = project.paceline("train", "sums.yaml", "--on", "slurm", "--run-dir", "unanswered")
    finally:
        project.cluster.start_controller()
    assert done.returncode == 1
    assert "scontrol ping" in done.stderr
    assert not (project.folder / "unanswered").exists()
