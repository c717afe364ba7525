"""A run on hosts of its own, and somebody who starts a launcher again when it ends too early."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from chaotic.notes import Notes
from chaotic.work import PAUSE, STEPS_FILE
from paceline.testing.hosts import Host, Hosts
from paceline.testing.processes import is_alive, pids, was_started_with

BENCHMARKS = Path(__file__).parents[1]
TAG = "PACELINE_BENCH_RUN"
PORT = 29400
_BEFORE_AGAIN_S = 0.3
_MOST_ENDS_IN_A_ROW = 10


class Stuck(Exception):
    """The run did not get where it should have been by now."""


@dataclass
class Launcher:
    """A launcher on a host, as somebody who watches it sees it."""

    host: Host
    process: subprocess.Popen[bytes] | None = None
    wanted: bool = True
    exits: list[int] = field(default_factory=list)
    ended_at: float = 0.0

    @property
    def done(self) -> bool:
        """Whether it ended well: the run is over."""
        return bool(self.exits) and self.exits[-1] == 0 and self.process is None


class Cluster:
    """``nodes`` hosts with ``nproc`` ranks each that train one run, in the folder ``base``.

    ``settings`` is the run's config; a step of one rank takes ``pause`` seconds more than it must,
    so that a fault can hit it. All hosts share the disk; each has a memory of its own.
    """

    def __init__(
        self,
        base: Path,
        settings: dict[str, Any],
        *,
        nodes: int,
        nproc: int,
        nnodes: str | None = None,
        pause: float = 0.06,
    ) -> None:
        self.base, self.nodes, self.nproc = base, nodes, nproc
        self.nnodes = nnodes or str(nodes)
        self.run_dir = base / "run"
        self.disk = base / "disk"
        self.notes = Notes(base / "steps.jsonl")
        self.config = base / "config.yaml"
        base.mkdir(parents=True)
        self.disk.mkdir()
        settings = {**settings, "checkpoint": {**settings["checkpoint"], "where": str(self.disk)}}
        self.config.write_text(yaml.safe_dump(settings), encoding="utf-8")
        paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.tag = uuid.uuid4().hex
        self.environment = {
            **os.environ,
            STEPS_FILE: str(self.notes.path),
            PAUSE: str(pause),
            TAG: self.tag,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        self.launchers: list[Launcher] = []
        self._ends_in_a_row = 0
        self._networks: set[str] = set()
        self._left: list[str] = []

    @contextlib.contextmanager
    def up(self) -> Iterator[Cluster]:
        """The hosts, with a launcher on each; everything is ended in the end."""
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", self.disk], check=True)
        with Hosts(self.nodes, private_memory=True) as hosts:
            self.launchers = [Launcher(host) for host in hosts]
            look = ["readlink", "/proc/self/ns/net"]
            self._networks = {_output(host, look).strip() for host in hosts}
            for launcher in self.launchers:
                self.start(launcher)
            try:
                yield self
            finally:
                self.end()
            memory = ["find", "/dev/shm", "-mindepth", "1"]
            for host in hosts:
                self._left += [
                    f"{name} on {host.name}" for name in _output(host, memory).splitlines()
                ]
                self._left += [f"process {pid} on {host.name}" for pid in _staying(host)]

    def start(self, launcher: Launcher) -> None:
        """Start a launcher: the run's first one, or one that goes on with it."""
        number = self.launchers.index(launcher)
        log = self.base / f"launcher{number}.log"
        with open(log, "ab") as output:
            launcher.process = launcher.host.popen(
                self._command(), env=self.environment, cwd=BENCHMARKS,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def _command(self) -> list[str]:
        command = [str(Path(sys.executable).with_name("paceline")), "train"]
        if (self.run_dir / "config.yaml").exists():
            command += ["--resume", str(self.run_dir)]
        else:
            command += [str(self.config), "--run-dir", str(self.run_dir)]
        command += ["--nproc", str(self.nproc)]
        if self.nodes > 1:
            # The first two can host the meeting: with either of them gone, there is the other.
            rdzv = ",".join(f"{one.host.address}:{PORT}" for one in self.launchers[:2])
            command += ["--nnodes", self.nnodes, "--rdzv", rdzv]
        return command

    def tend(self) -> None:
        """Take note of launchers that ended, and start those again that should be there."""
        if self.notes.read():
            self._ends_in_a_row = 0
        for launcher in self.launchers:
            if launcher.process is not None and launcher.process.poll() is not None:
                launcher.exits.append(launcher.process.returncode)
                launcher.process, launcher.ended_at = None, time.time()
                self._ends_in_a_row += 1
            due = time.time() > launcher.ended_at + _BEFORE_AGAIN_S
            if launcher.process is None and launcher.wanted and not self.done and due:
                self.start(launcher)

    @property
    def done(self) -> bool:
        """Whether a launcher has said that the run is over."""
        return any(launcher.done for launcher in self.launchers)

    def wait(self, what: str, condition: Callable[[], Any], seconds: float = 120.0) -> Any:
        """Tend the launchers until ``condition`` gives something; that is returned."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if self.done and all(one.process is None for one in self.launchers):
                raise Stuck(f"no {what} before the run was over; {self.state()}")
            if time.monotonic() > deadline:
                raise Stuck(f"no {what} within {seconds:.0f} s; {self.state()}")
            if self._ends_in_a_row > _MOST_ENDS_IN_A_ROW:
                raise Stuck(f"no {what}: launchers end again and again; {self.state()}")
            self.tend()
            time.sleep(0.02)
        return found

    def wait_done(self, seconds: float = 300.0) -> None:
        """Wait until every launcher that is wanted has ended well."""
        self.wait(
            "end of the run",
            lambda: all(one.done or not one.wanted for one in self.launchers),
            seconds,
        )

    def state(self) -> str:
        """Where the run is, for an error message."""
        exits = [launcher.exits[-8:] for launcher in self.launchers]
        return f"step {self.notes.step}, launchers ended with {exits}, see {self.base}"

    def end(self) -> None:
        """Kill the launchers; what they started must go with them."""
        for launcher in self.launchers:
            launcher.wanted = False
            if launcher.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(launcher.process.pid, signal.SIGKILL)
                launcher.process.wait()

    def unmount(self) -> None:
        """Let go of the disk, and of what is on it."""
        subprocess.run(["umount", self.disk], check=True)

    def left_over(self) -> list[str]:
        """What there is yet of a run that has ended, in words."""
        processes = [pid for pid in pids() if pid != os.getpid() and is_alive(pid)]
        ours = [pid for pid in processes if was_started_with(pid, TAG, self.tag)]
        networks = {_network_of(pid) for pid in processes} & self._networks
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        return [
            *self._left,
            *(f"process {pid}" for pid in ours),
            *(f"network {network}" for network in networks),
            *(mount for mount in mounts if str(self.base) in mount),
        ]


def _staying(host: Host) -> list[int]:
    """The processes on a host, but for those that are about to be gone: they were just ended."""
    deadline = time.monotonic() + 10
    while (found := host.processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _output(host: Host, command: list[str]) -> str:
    done = host.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return str(done.stdout)


def _network_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:  # it has ended
        return ""
