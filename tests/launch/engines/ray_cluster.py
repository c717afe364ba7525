"""A real Ray of two nodes, each in a network namespace: runs, kills, ends, and one's own trainer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from node_cases import MODULE, wait_for

from paceline import events
from paceline.events import RanksStarted, StepDone
from paceline.testing.hosts import Host, Hosts, hosts_available

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.cold,
    pytest.mark.skipif(hosts_available() is not None, reason=str(hosts_available())),
    pytest.mark.timeout(1500),
]
PATIENCE = 600.0
"""Ray starts a dozen processes of Python for a run, on machines that do other things as well."""
STEPS = 24
CONFIG = f"""
name: sums
model: {{target: "torch.nn:Linear", args: {{in_features: 8, out_features: 1}}}}
loss: {{target: "torch.nn:MSELoss"}}
data: {{target: "node_sums:Sums"}}
optimizer: {{name: adamw, lr: 0.01}}
schedule: {{name: constant, warmup_steps: 0}}
batch: {{global_batch: 8}}
train: {{steps: {STEPS}}}
checkpoint: {{every: 3}}
track: {{split_every: null}}
hangs: {{after: null}}
launch: {{device: cpu, nproc: 2}}
"""
NOTES_PID = """
with open(f"pid{os.environ['RANK']}", "w") as file:
    file.write(str(os.getpid()))
"""
OWN = """
import json, sys
import ray, ray.train, torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
import paceline
from paceline.ray import RayReport

def train_loop(config):
    from node_sums import Sums

    world = paceline.World.init()
    model = torch.nn.Linear(8, 1)
    trainer = paceline.Trainer(
        model,
        loss=torch.nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        global_batch=8,
        run_dir=config["run"],
        progress=False,
        callbacks=[RayReport()],
    )
    trainer.fit(Sums(), Sums(), steps=4)
    return [world.size, world.nodes, world.backend]

ray.init(address=sys.argv[1], runtime_env={"env_vars": {"PYTHONPATH": sys.argv[2]}})
folder = sys.argv[3]
trainer = TorchTrainer(
    train_loop,
    train_loop_config={"run": f"{folder}/own"},
    scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
    run_config=RunConfig(name="own", storage_path=folder),
)
result = trainer.fit()
with open(f"{folder}/own.json", "w") as file:
    json.dump([result.return_value, result.metrics, result.checkpoint.path], file)
"""


class RayCluster:
    """Two raylets on two hosts, and commands on the first of them."""

    def __init__(self, hosts: Hosts, folder: Path, scratch: Path) -> None:
        self.hosts, self.folder, self._scratch = hosts, folder, scratch
        self.address = f"{hosts[0].address}:6379"
        self.client = f"ray://{hosts[0].address}:10001"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """The head, and one more node."""
        few = ["--num-cpus=2", "--object-store-memory=80000000", "--block", "--disable-usage-stats"]
        first, second = self.hosts
        self._ray(
            first,
            *("--head", f"--node-ip-address={first.address}", "--port=6379"),
            *("--ray-client-server-port=10001", "--include-dashboard=false"),
            *(f"--temp-dir={self._scratch}", *few),
        )
        self._ray(second, f"--address={self.address}", f"--node-ip-address={second.address}", *few)

    def _ray(self, host: Host, *words: str) -> None:
        """A node that runs; Ray gives it half a minute, which a busy machine may not have."""
        path = self.folder / f"{host.name}.ray"
        command = [str(Path(sys.executable).with_name("ray")), "start", *words]
        for _ in range(5):
            with open(path, "wb") as out:
                options: dict[str, Any] = {"stdout": out, "stderr": subprocess.STDOUT}
                process = host.popen(command, env=environment(), cwd=self.folder, **options)
            self._processes.append(process)

            def settled(process: subprocess.Popen[bytes] = process) -> bool:
                return process.poll() is not None or "Ray runtime started" in path.read_text()

            wait_for(settled, f"a node of Ray on {host.name}", PATIENCE)
            if process.poll() is None:
                return
            host.kill()
        raise AssertionError(self.output())

    def output(self) -> str:
        """What the nodes have printed."""
        return "\n".join(file.read_text() for file in self.folder.glob("*.ray"))

    def close(self) -> None:
        """End everything on both hosts, and wait for it."""
        for host in self.hosts:
            host.kill()
        for process in self._processes:
            process.wait()

    def train(self, *words: str, out: str) -> subprocess.Popen[bytes]:
        """``paceline train`` on the first host."""
        with open(self.folder / out, "wb") as file:
            return self.hosts[0].popen(
                [sys.executable, "-m", "paceline", "train", *words],
                env=environment(),
                cwd=self.folder,
                stdout=file,
                stderr=subprocess.STDOUT,
            )


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": ".",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # one process less to start
    }


@contextmanager
def ray_cluster(folder: Path) -> Iterator[RayCluster]:
    (folder / "sums.yaml").write_text(CONFIG)
    (folder / "node_sums.py").write_text(MODULE + NOTES_PID)
    scratch = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # short: sockets are in it
    try:
        with Hosts(2) as hosts:
            cluster = RayCluster(hosts, folder, scratch)
            try:
                cluster.start()
                yield cluster
            finally:
                cluster.close()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def of(run: Path, kind: type[Any]) -> list[Any]:
    path = run / events.FILE_NAME
    return [one for one in events.read(path) if isinstance(one, kind)] if path.exists() else []


def losses(run: Path) -> dict[int, float]:
    return {one.step: one.loss for one in of(run, StepDone)}


def test_two_nodes(tmp_path: Path) -> None:
    with ray_cluster(tmp_path) as cluster:
        expected = on_local_ranks(cluster)
        a_killed_worker(cluster, expected)
        told_to_leave(cluster, expected)
        ones_own_trainer(cluster)


def on_local_ranks(cluster: RayCluster) -> dict[int, float]:
    """The same config on two ranks of one machine."""
    local = cluster.train("sums.yaml", "--run-dir", "local", out="local.out")
    assert local.wait(PATIENCE) == 0, (cluster.folder / "local.out").read_text()
    return losses(cluster.folder / "local")


def on_ray(cluster: RayCluster, address: str, run: str) -> subprocess.Popen[bytes]:
    options = (f"address={address}", "placement=STRICT_SPREAD")
    sets = [word for option in options for word in ("--set", f"launch.ray.{option}")]
    more = ("--nproc", "1", "--nnodes", "2", "--run-dir", run)
    return cluster.train("sums.yaml", "--on", "ray", *more, *sets, out=f"{run}.out")


def reaches(
    process: subprocess.Popen[bytes], out: Path, ready: Callable[[], Any], what: str
) -> Any:
    def look() -> Any:
        assert process.poll() is None, out.read_text()
        return ready()

    try:
        return wait_for(look, what, PATIENCE)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{out.read_text()}") from None


def a_killed_worker(cluster: RayCluster, expected: dict[int, float]) -> None:
    """Ray starts the ranks again, and they go on from the newest checkpoint."""
    run, out = cluster.folder / "killed", cluster.folder / "killed.out"
    slow = cluster.folder / "slow"
    slow.write_text("0.05")
    command = on_ray(cluster, cluster.address, "killed")

    def has_saved() -> bool:
        return max(losses(run), default=0) >= 5 and any(run.glob("checkpoints/step-*"))

    reaches(command, out, has_saved, "a checkpoint")
    [first] = of(run, RanksStarted)
    assert (first.world_size, sorted(first.nodes)) == (2, ["host0", "host1"])
    os.kill(int((cluster.folder / "pid1").read_text()), signal.SIGKILL)
    slow.unlink()
    assert command.wait(PATIENCE) == 0, out.read_text()
    assert [one.attempt for one in of(run, RanksStarted)] == [0, 1], out.read_text()
    assert losses(run) == expected
    text = out.read_text()
    assert "rank 0 is here" in text, text
    assert f"step {STEPS}/{STEPS}" in text, text
    # What ray.train.Result.from_path(run) reads.
    last = json.loads((run / "checkpoint_manager_snapshot.json").read_text())
    latest = last["latest_checkpoint_result"]
    assert latest["checkpoint_dir_name"] == f"checkpoints/step-{STEPS:09d}"
    assert latest["metrics"]["checkpoint_step"] == STEPS
    assert latest["metrics"]["loss"] == expected[STEPS]


def told_to_leave(cluster: RayCluster, expected: dict[int, float]) -> None:
    """By a ray:// address: SIGTERM has the ranks save and leave; local ranks go on from there."""
    run, out = cluster.folder / "left", cluster.folder / "left.out"
    (cluster.folder / "slow").write_text("0.05")
    command = on_ray(cluster, cluster.client, "left")
    reaches(command, out, lambda: max(losses(run), default=0) >= 2, "two steps")
    command.send_signal(signal.SIGTERM)
    assert command.wait(PATIENCE) == 143, out.read_text()
    done = max(losses(run))
    assert done < STEPS
    assert (run / f"checkpoints/step-{done:09d}").exists(), out.read_text()
    assert f"stopped at step {done}; saved to" in out.read_text()
    (cluster.folder / "slow").unlink()
    more = ("--nproc", "2", "--nnodes", "1")
    again = cluster.train("--resume", "left", *more, out="again.out")
    assert again.wait(PATIENCE) == 0, (cluster.folder / "again.out").read_text()
    assert losses(run) == expected


def ones_own_trainer(cluster: RayCluster) -> None:
    """A TorchTrainer as Ray's own documentation has it, with a Trainer of ours in its function."""
    folder = str(cluster.folder)
    (cluster.folder / "own.py").write_text(OWN)
    done = cluster.hosts[0].run(
        [sys.executable, "own.py", cluster.address, folder, folder],
        env=environment(),
        cwd=cluster.folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    value, metrics, checkpoint = json.loads((cluster.folder / "own.json").read_text())
    assert value == [2, 2, "gloo"]
    assert metrics["step"] == 4
    assert "val_loss" in metrics
    assert checkpoint == f"{folder}/own/checkpoints/step-000000004"
