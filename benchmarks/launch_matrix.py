"""The same config on every engine: are the losses and gradient norms the same, to the last bit?

    python benchmarks/launch_matrix.py --write docs/guides/launch.md

A small GPT with dropout trains on two ranks, on each layout and by each engine: ranks of this
machine; real sshd on two hosts (network namespaces); a real SLURM of two nodes; a real Ray cluster
of two hosts; real mpirun, of Open MPI and of MPICH. It needs root, and what ``.ci/run`` installs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The clusters are those of the tests.
sys.path[:0] = [str(ROOT / "tests" / place) for place in ("", "launch", "launch/engines")]

from ray_cluster import RayCluster  # noqa: E402
from ray_cluster import environment as ray_environment  # noqa: E402
from slurm_cluster import SlurmCluster  # noqa: E402
from ssh_hosts import SshHosts  # noqa: E402

from paceline import events  # noqa: E402
from paceline.events import RanksStarted, StepDone  # noqa: E402
from paceline.formatting import plural  # noqa: E402
from paceline.testing.hosts import Hosts  # noqa: E402

LAYOUTS = ("dp=2", "dp=2,zero=3", "tp=2", "pp=2")
STEPS = 8
CONFIG = f"""
name: gpt
model: {{args: {{width: 32, heads: 4, layers: 2, context: 32, dropout: 0.1}}}}
data: {{args: {{context: 32}}}}
schedule: {{warmup_steps: 2}}
batch: {{global_batch: 8}}
train: {{steps: {STEPS}, eval_every: {STEPS}}}
track: {{split_every: null}}
launch: {{device: cpu, standby: false}}
"""
BEGIN, END = "<!-- launch matrix -->", "<!-- end of launch matrix -->"
PATIENCE = 600.0

Train = Callable[..., None]
"""Type ``paceline train gpt.yaml`` with more words, and wait for the end of what it started."""


def main() -> None:
    """Run every engine on every layout, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="write the table into this page")
    parser.add_argument("--layouts", default=";".join(LAYOUTS), help="which, separated by ;")
    parser.add_argument("--engines", default=",".join(ENGINES), help="which, separated by commas")
    chosen = parser.parse_args()
    layouts = chosen.layouts.split(";")
    found: dict[tuple[str, str], str] = {}
    with tempfile.TemporaryDirectory(prefix="matrix", dir="/tmp") as temporary:
        folder = Path(temporary)
        (folder / "gpt.yaml").write_text(CONFIG)
        expected = {layout: on_local_ranks(folder, layout) for layout in layouts}
        for engine in chosen.engines.split(","):
            with ENGINES[engine](folder) as train:
                for layout in layouts:
                    run = f"{engine}-{layout}".replace(" ", "-")
                    train("--layout", layout, "--run-dir", run)
                    found[engine, layout] = verdict(folder / run, expected[layout])
                    print(f"{engine:12} {layout:12} {found[engine, layout]}", flush=True)
    table = as_table(chosen.engines.split(","), layouts, found)
    print(table)
    if chosen.write:
        page = chosen.write.read_text()
        pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.S)
        assert pattern.search(page), f"{chosen.write} has no place for it: {BEGIN}"
        chosen.write.write_text(pattern.sub(lambda _: f"{BEGIN}\n\n{table}\n\n{END}", page))
    if any(not text.startswith("same") for text in found.values()):
        raise SystemExit(1)


def on_local_ranks(folder: Path, layout: str) -> list[tuple[int, float, float]]:
    """What two ranks of this machine compute."""
    run = f"local-{layout}"
    type_command(folder, {}, "--nproc", "2", "--layout", layout, "--run-dir", run)
    return numbers(folder / run)


def numbers(run: Path) -> list[tuple[int, float, float]]:
    """The loss and the gradient norm of every step."""
    done = [event for event in events.read(run / events.FILE_NAME) if isinstance(event, StepDone)]
    return [(event.step, event.loss, event.grad_norm or 0.0) for event in done]


def verdict(run: Path, expected: list[tuple[int, float, float]]) -> str:
    """Whether a run computed what is expected, and on how many machines."""
    found = numbers(run)
    started = [e for e in events.read(run / events.FILE_NAME) if isinstance(e, RanksStarted)]
    if found == expected:
        return f"same ({plural(len(started[-1].nodes), 'machine')})"
    wrong = next((a for a, b in zip(found, expected, strict=False) if a != b), "too few steps")
    return f"differs: {wrong}"


def type_command(folder: Path, env: dict[str, str], *words: str, host: object = None) -> str:
    """``paceline train gpt.yaml`` on this machine or a host; its output."""
    command = [sys.executable, "-m", "paceline", "train", "gpt.yaml", *words]
    popen = subprocess.Popen if host is None else host.popen  # type: ignore[attr-defined]
    process = popen(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = str(process.communicate(timeout=PATIENCE)[0])
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{said}")
    return said


@contextlib.contextmanager
def ssh(folder: Path) -> Iterator[Train]:
    """Two hosts with an sshd each, and a third on which the command is typed."""
    with contextlib.ExitStack() as stack:
        there = SshHosts(folder, stack)
        config = f"launch.ssh.config={there.folder / 'client.conf'}"
        env = {"HOME": str(folder), "XDG_STATE_HOME": str(folder / "state")}

        def train(*words: str) -> None:
            more = ("--on", "ssh", "--hosts", "node0:1,node1:1", "--set", config)
            type_command(folder, env, *more, *words, host=there.control)

        yield train


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Train]:
    """Two slurmd; the job is waited for."""
    with SlurmCluster(folder / "slurm") as cluster:

        def train(*words: str) -> None:
            more = ("--on", "slurm", "--nnodes", "2", "--nproc", "1")
            type_command(folder, {"SLURM_CONF": str(cluster.conf)}, *more, *words)
            job = cluster.command("squeue", "-h", "-o", "%A").split()
            for one in job:
                cluster.wait_for_state(one, "COMPLETED", "FAILED")

        yield train


@contextlib.contextmanager
def ray(folder: Path) -> Iterator[Train]:
    """Two raylets on two hosts; the command is typed on the first."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as scratch, Hosts(2) as hosts:
        cluster = RayCluster(hosts, folder, Path(scratch))
        try:
            cluster.start()

            def train(*words: str) -> None:
                sets = (f"address={cluster.client}", "placement=STRICT_SPREAD")
                more = [word for text in sets for word in ("--set", f"launch.ray.{text}")]
                more += ["--on", "ray", "--nnodes", "2", "--nproc", "1"]
                type_command(folder, ray_environment(), *more, *words, host=hosts[0])

            yield train
        finally:
            cluster.close()


def mpi(kind: str) -> Callable[[Path], contextlib.AbstractContextManager[Train]]:
    """mpirun of Open MPI or of MPICH, on this machine."""

    @contextlib.contextmanager
    def started(folder: Path) -> Iterator[Train]:
        def train(*words: str) -> None:
            more = ("--on", "mpi", "--nproc", "2", "--set", f"launch.mpi.mpirun=mpirun.{kind}")
            type_command(folder, {}, *more, *words)

        yield train

    return started


ENGINES: dict[str, Callable[[Path], contextlib.AbstractContextManager[Train]]] = {
    "ssh": ssh,
    "slurm": slurm,
    "ray": ray,
    "mpi (Open MPI)": mpi("openmpi"),
    "mpi (MPICH)": mpi("mpich"),
}


def as_table(engines: list[str], layouts: list[str], found: dict[tuple[str, str], str]) -> str:
    """Engines down, layouts across."""
    rows = [["`--on`", *(f"`{layout}`" for layout in layouts)], ["---"] * (len(layouts) + 1)]
    rows += [[engine, *(found[engine, layout] for layout in layouts)] for engine in engines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
