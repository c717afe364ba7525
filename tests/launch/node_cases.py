"""A small run for several launchers, and how tests start them, look at them and hurt them."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from paceline import events
from paceline.events import Event, RanksStarted, StepDone
from paceline.testing.hosts import Host
from paceline.testing.processes import command_line, pids
from ports import free_port

T = TypeVar("T")
E = TypeVar("E", bound=Event)

PATIENCE = 250.0
"""Seconds to wait for what must happen: much more than it takes, as machines may be busy."""
NODE_TIMEOUT = 10.0
CALM = 30.0
"""Such a timeout for runs that lose no machine without a word: a busy one is none."""
STEPS = 400
"""More than a slow run does while anything happens to it; without delay they take seconds."""

MODULE = """
import os
import time

import torch
from torch.utils.data import Dataset


print("rank", os.environ["RANK"], "is here")


class Sums(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        try:
            with open("slow") as file:
                time.sleep(float(file.read()))
        except FileNotFoundError:
            pass
        values = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return values, values.sum().unsqueeze(0)
"""

CONFIG = """
name: sums
model: {{target: "torch.nn:Linear", args: {{in_features: 8, out_features: 1}}}}
loss: {{target: "torch.nn:MSELoss"}}
data: {{target: "node_sums:Sums"}}
optimizer: {{name: sgd, lr: 0.01}}
schedule: {{name: constant, warmup_steps: 0}}
batch: {{global_batch: 8}}
train: {{steps: {steps}}}
checkpoint: {{every: 20, every_minutes: 0.05}}
track: {{split_every: null}}
hangs: {{after: null}}
launch:
  device: cpu
  nproc: 1
  standby: false
  node_timeout: {node_timeout}
  rejoin_timeout: 120
"""


def wait_for(look: Callable[[], T], what: str, seconds: float = PATIENCE) -> T:
    """What ``look`` returns once it is true."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.05)
    return found


class Launcher:
    """A ``paceline train`` that runs, on a host or on this machine."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        name: str,
        host: Host | None,
        env: dict[str, str],
    ) -> None:
        self.name = name
        self.out = folder / f"{name}.out"
        with open(self.out, "wb") as out:
            options: dict[str, Any] = {"stdout": out, "stderr": subprocess.STDOUT, "env": env}
            if host is None:
                self.process = subprocess.Popen(command, cwd=folder, **options)
            else:
                self.process = host.popen(command, cwd=folder, **options)

    @property
    def text(self) -> str:
        """What it has printed."""
        return self.out.read_text(encoding="utf-8", errors="replace")

    def ranks(self) -> list[int]:
        """The processes of its ranks."""
        found = []
        for pid in pids():
            with contextlib.suppress(OSError, IndexError):
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid and "launch.worker" in command_line(pid):
                    found.append(pid)
        return found

    def send(self, signum: int) -> None:
        """Send it a signal."""
        self.process.send_signal(signum)

    def ends(self, seconds: float = PATIENCE) -> int:
        """Its exit status, waited for."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs:\n{self.text}") from None


class Cluster:
    """Launchers of one run in ``folder``; none outlives the test."""

    def __init__(
        self,
        folder: Path,
        *,
        steps: int = STEPS,
        slow: bool = True,
        delay: float = 0.1,
        nnodes: str = "1:2",
        rdzv: str | None = None,
        node_timeout: float = NODE_TIMEOUT,
        more: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        text = CONFIG.format(steps=steps, node_timeout=node_timeout)
        self._slow = folder / "slow"
        if slow:
            self._slow.write_text(str(delay))
        (folder / "sums.yaml").write_text(text)
        (folder / "node_sums.py").write_text(MODULE)
        self.rdzv = rdzv or f"127.0.0.1:{free_port()}"
        self.arguments = ["sums.yaml", "--nnodes", nnodes, "--rdzv", self.rdzv, *more]
        self.launchers: list[Launcher] = []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for launcher in self.launchers:
            if launcher.process.poll() is None:
                launcher.send(signal.SIGCONT)
                launcher.send(signal.SIGKILL)
            launcher.process.wait()
        wait_for(lambda: not self._ranks_left(), "ranks of killed launchers to end")

    def start(
        self, host: Host | None = None, arguments: Sequence[str] | None = None, name: str = ""
    ) -> Launcher:
        """Start one more launcher."""
        command = [sys.executable, "-m", "paceline", "train", *(arguments or self.arguments)]
        launcher = Launcher(
            command, self.folder, name or f"launcher{len(self.launchers)}", host, _environment()
        )
        self.launchers.append(launcher)
        return launcher

    def hurry(self) -> None:
        """Let the run, which was slow so that there was time to do harm, come to its end."""
        self._slow.unlink()

    @property
    def run(self) -> Path:
        """The run's folder; there must be one alone."""
        runs = wait_for(lambda: list((self.folder / "runs").glob("*")), "a run folder")
        assert len(runs) == 1, f"one run, one folder: {runs}"
        return runs[0]

    def events(self) -> list[Event]:
        """The run's events so far."""
        path = self.run / events.FILE_NAME
        return list(events.read(path)) if path.exists() else []

    def of(self, kind: type[E]) -> list[E]:
        """Those of one kind."""
        return [event for event in self.events() if isinstance(event, kind)]

    def step(self) -> int:
        """The last step done."""
        done = self.of(StepDone)
        return done[-1].step if done else 0

    def reaches(self, step: int) -> None:
        """Wait for a step, telling what was printed if it does not come."""

        def there() -> bool:
            return self.step() >= step

        try:
            wait_for(there, f"step {step}")
        except AssertionError as error:
            raise AssertionError(f"{error}; step {self.step()}\n{self.outputs()}") from None

    def outputs(self) -> str:
        """All that was printed, and the logs of all ranks."""
        said = [f"--- {launcher.name}\n{launcher.text}" for launcher in self.launchers]
        logs = sorted(self.folder.glob("runs/*/logs/**/*.log"))
        said += [f"--- {path}\n{path.read_text(errors='replace')[-2000:]}" for path in logs]
        return "\n".join(said)

    def losses(self) -> dict[int, float]:
        """The loss of each step; of one that was repeated, the last."""
        return {event.step: event.loss for event in self.of(StepDone)}

    def _ranks_left(self) -> list[int]:
        launchers = {launcher.process.pid for launcher in self.launchers}
        return [pid for pid in pids() if _was_rank_of(pid) in launchers]


def _was_rank_of(pid: int) -> int | None:
    """The launcher that a living rank was started by."""
    with contextlib.suppress(OSError):
        found = re.search(
            rb"PACELINE_LAUNCHER_PID=(\d+)", Path(f"/proc/{pid}/environ").read_bytes()
        )
        return int(found[1]) if found else None
    return None


def _environment() -> dict[str, str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([".", *env.get("PYTHONPATH", "").split(os.pathsep)])
    return env


def same_losses(found: dict[int, float], expected: dict[int, float]) -> None:
    """The same steps with the same losses, as if nothing had happened."""
    assert sorted(found) == sorted(expected)
    wrong = {
        step: (loss, expected[step])
        for step, loss in found.items()
        if not math.isclose(loss, expected[step], rel_tol=1e-4, abs_tol=1e-6)
    }
    assert not wrong, f"losses that differ from the undisturbed run's: {wrong}"


def worlds(cluster: Cluster) -> list[int]:
    """The sizes of the worlds there were."""
    return [event.world_size for event in cluster.of(RanksStarted)]


def sizes(cluster: Cluster) -> list[int]:
    """Those sizes as they changed.

    On a busy machine, a launcher may miss the world that was to take it in. Then one of the same
    size as before is started, and takes it in a little later.
    """
    return [size for size, _ in itertools.groupby(worlds(cluster))]
