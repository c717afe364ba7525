"""Real mpirun, of Open MPI and of MPICH, on one host and on two in network namespaces."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from node_cases import MODULE, wait_for

from paceline import events
from paceline.events import RanksStarted, StepDone
from paceline.testing.hosts import Hosts, hosts_available

PATIENCE = 300.0
STEPS = 60
CONFIG = f"""
name: sums
model: {{target: "torch.nn:Linear", args: {{in_features: 8, out_features: 1}}}}
loss: {{target: "torch.nn:MSELoss"}}
data: {{target: "node_sums:Sums"}}
optimizer: {{name: adamw, lr: 0.01}}
schedule: {{name: constant, warmup_steps: 0}}
batch: {{global_batch: 8}}
train: {{steps: {STEPS}}}
track: {{split_every: null}}
hangs: {{after: null}}
launch: {{device: cpu, nproc: 2, standby: false}}
"""
AGENT = """#!{python}
import os, sys
places = {places!r}
words = sys.argv[1:]
while words[0].startswith("-"):
    words = words[1:]
host, *command = words
os.execvp("nsenter", [*places[host], "sh", "-c", " ".join(command)])
"""
"""Stands in for ssh: gets a host and a command, as mpirun gives them, and runs that there."""
KINDS = [kind for kind in ("openmpi", "mpich") if shutil.which(f"mpirun.{kind}")]

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not KINDS, reason="no mpirun here: install openmpi-bin or mpich"),
    pytest.mark.timeout(900),
]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "."}


def train(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    with open(folder / "out", "wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "paceline", "train", "sums.yaml", *words],
            env=environment(),
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def losses(run: Path) -> dict[int, float]:
    path = run / events.FILE_NAME
    found = events.read(path) if path.exists() else []
    return {one.step: one.loss for one in found if isinstance(one, StepDone)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sums.yaml").write_text(CONFIG)
    (tmp_path / "node_sums.py").write_text(MODULE)
    return tmp_path


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of two local ranks."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "sums.yaml").write_text(CONFIG)
    (folder / "node_sums.py").write_text(MODULE)
    assert train(folder, "--run-dir", "run").wait(PATIENCE) == 0, (folder / "out").read_text()
    return losses(folder / "run")


@pytest.mark.parametrize("kind", KINDS)
def test_one_host_and_ctrl_c(kind: str, folder: Path, expected: dict[int, float]) -> None:
    chosen = ("--on", "mpi", "--set", f"launch.mpi.mpirun=mpirun.{kind}", "--run-dir", "run")
    (folder / "slow").write_text("0.1")
    command = train(folder, *chosen)
    wait_for(lambda: len(losses(folder / "run")) >= 2, "two steps", PATIENCE)
    command.send_signal(signal.SIGINT)
    assert command.wait(PATIENCE) == 130, (folder / "out").read_text()
    done = max(losses(folder / "run"))
    assert done < STEPS, "it was ended on the way"
    assert (folder / f"run/checkpoints/step-{done:09d}").exists(), (folder / "out").read_text()
    (folder / "slow").unlink()
    again = train(folder, *chosen, "--resume", "auto")
    assert again.wait(PATIENCE) == 0, (folder / "out").read_text()
    assert losses(folder / "run") == expected


@pytest.mark.skipif(hosts_available() is not None, reason=str(hosts_available()))
@pytest.mark.parametrize("kind", KINDS)
def test_two_hosts(kind: str, folder: Path, expected: dict[int, float]) -> None:
    with Hosts(2) as hosts:
        agent = folder / "agent"
        places = {host.name: host.command([], folder) for host in hosts}
        agent.write_text(AGENT.format(python=sys.executable, places=places))
        agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
        remote = {
            "openmpi": ["--mca", "plm_rsh_agent", str(agent)],
            "mpich": ["-launcher", "ssh", "-launcher-exec", str(agent)],
        }[kind]
        words = ["--on", "mpi", "--hosts", "host0:1,host1:1", "--nnodes", "2", "--nproc", "1"]
        sets = [f"launch.mpi.mpirun=mpirun.{kind}", f"launch.mpi.args={remote!r}"]
        command = hosts[0].popen(
            [sys.executable, "-m", "paceline", "train", "sums.yaml", "--run-dir", "run", *words]
            + [word for one in sets for word in ("--set", one)],
            env=environment(),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said = command.communicate(timeout=PATIENCE)[0]
    assert command.returncode == 0, said
    assert losses(folder / "run") == expected
    written = events.read(folder / "run" / events.FILE_NAME)
    [world] = [e for e in written if isinstance(e, RanksStarted)]
    assert sorted(world.nodes) == ["host0", "host1"], said
