"""Scripts under a real mpirun: their ranks are one world, with the losses of ``paceline train``.

Skipped where there is no such MPI; CI installs both.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FLAGS = {
    "openmpi": ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"],
    "mpich": [],
}
HOSTS = {
    "openmpi": ["--host", "{here}:2,127.0.0.2:1", "--mca", "plm_rsh_agent", "{agent}"],
    "mpich": ["-hosts", "{here}:2,127.0.0.2:1", "-launcher", "ssh", "-launcher-exec", "{agent}"],
}
EXPORT = {
    "openmpi": ["-x", "MASTER_ADDR=127.0.0.1", "-x", "MASTER_PORT={port}"],
    "mpich": ["-genv", "MASTER_ADDR", "127.0.0.1", "-genv", "MASTER_PORT", "{port}"],
}

TRAIN = """
import torch
import paceline

world = paceline.World.init(device="cpu", timeout=120)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
engine = paceline.Engine(
    model,
    loss=torch.nn.functional.mse_loss,
    optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
)
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
for batch in paceline.loader(dataset, global_batch=16, seed=0, layout=engine.layout):
    result = engine.step(batch)
    if world.is_main:
        print("loss", float(result.loss).hex(), world.size, world.nodes, flush=True)
world.close()
"""
# Without torch: what is read of the environment, and which error comes of it.
READ = """
import json, os
from pathlib import Path
from paceline.errors import WorldError
from paceline.launch.environment import read_environment

try:
    env = read_environment()
    found = [env.launcher, env.rank, env.size, env.local_rank, env.local_size, env.address, env.port]
except WorldError as error:
    found = [str(error)]
Path(f"found-{os.getpid()}.json").write_text(json.dumps(found))
"""
AGENT = """#!/bin/sh
# Stands for ssh: what is to run on another host runs here.
while [ "${1#-}" != "$1" ]; do shift; done
shift
exec sh -c "$*"
"""

pytestmark = pytest.mark.cluster
mpis = pytest.mark.parametrize(
    "mpi",
    [
        pytest.param(
            mpi,
            marks=pytest.mark.skipif(
                shutil.which(f"mpirun.{mpi}") is None, reason=f"there is no mpirun.{mpi}"
            ),
        )
        for mpi in FLAGS
    ],
)


def mpirun(mpi: str, folder: Path, ranks: int, script: str, *flags: str) -> list[str]:
    """The lines that the ranks of ``script`` print."""
    (folder / "script.py").write_text(script)
    command = [f"mpirun.{mpi}", *FLAGS[mpi], *flags, "-np", str(ranks), sys.executable, "script.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def read_by_ranks(mpi: str, folder: Path, *flags: str) -> list[list[object]]:
    """What each of three ranks found; in files, since an mpirun may mix their lines."""
    mpirun(mpi, folder, 3, READ, *flags)
    files = list(folder.glob("found-*.json"))
    found = sorted(json.loads(file.read_text()) for file in files)
    for file in files:
        file.unlink()
    assert len(found) == 3
    return found


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Those of ``paceline train --script`` on two ranks."""
    folder = tmp_path_factory.mktemp("paceline")
    (folder / "script.py").write_text(TRAIN)
    command = [sys.executable, "-m", "paceline", "train", "--nproc", "2", "--script", "script.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("loss")]
    assert len(found) == 4
    return found


@mpis
def test_the_same_losses_as_with_paceline_train(
    mpi: str, losses: list[str], tmp_path: Path
) -> None:
    found = mpirun(mpi, tmp_path, 2, TRAIN)
    assert [line for line in found if line.startswith("loss")] == losses


@mpis
def test_what_the_ranks_read_on_one_host_and_on_two(mpi: str, tmp_path: Path) -> None:
    name = {"openmpi": "Open MPI", "mpich": "MPICH (Hydra)"}[mpi]
    found = read_by_ranks(mpi, tmp_path)
    port = found[0][-1]
    assert found == [[name, rank, 3, rank, 3, "127.0.0.1", port] for rank in range(3)]
    # Another job has another port; that two jobs have the same one by chance is left to the third.
    assert {read_by_ranks(mpi, tmp_path)[0][-1] for _ in range(2)} != {port}

    agent = tmp_path / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    words = {"here": subprocess.check_output(["hostname"], text=True).strip(), "agent": str(agent)}
    hosts = [flag.format(**words) for flag in HOSTS[mpi]]
    for [said] in read_by_ranks(mpi, tmp_path, *hosts):
        assert str(said).startswith(
            f"{name} started ranks on several hosts, and MASTER_ADDR is not set"
        )
    export = [flag.format(port=29555) for flag in EXPORT[mpi]]
    assert read_by_ranks(mpi, tmp_path, *hosts, *export) == [
        [name, rank, 3, *place, "127.0.0.1", 29555]
        for rank, place in enumerate([(0, 2), (1, 2), (0, 1)])
    ]
