"""Starting the ranks of a training, here or on hosts of their own, and reading what they note."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.testing.hosts import Host
from wiring.task import Task
from wiring.ways import Way

BENCHMARKS = Path(__file__).parents[1]
_PORT = 29500
_MOST_SECONDS_WITHOUT_A_STEP = 180.0
_POLL_S = 0.25


@dataclass(frozen=True)
class Step:
    """What is known of a step: when it was done, its loss over all ranks, and bytes by then."""

    number: int
    time: float
    loss: float | None
    kernel: float
    """Bytes sent by the interface, mean of all ranks."""
    packets: float
    """Sent by the interface."""
    counted: float | None
    """The same as whoever trained counted it."""
    held_out: float | None = None


@dataclass
class Job:
    """A way to train on a task, in a folder of its own."""

    way: Way
    task: Task
    folder: Path
    device: str = "cpu"
    evaluate_at: Sequence[int] = ()

    def write(self) -> Path:
        """The job as its ranks read it."""
        self.folder.mkdir(parents=True)
        path = self.folder / "job.json"
        content = {
            "way": asdict(self.way),
            "task": asdict(self.task),
            "device": self.device,
            "evaluate_at": list(self.evaluate_at),
        }
        path.write_text(json.dumps(content))
        return path


@dataclass
class Outcome:
    """What came of a job: its steps, the first of which is the start, and why it failed."""

    way: Way
    steps: list[Step]
    error: str | None = None

    @property
    def done(self) -> int:
        """How many steps were done."""
        return self.steps[-1].number if self.steps else 0


@dataclass
class Ranks:
    """The processes of a job."""

    job: Job
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    store: Any = None
    """What they meet at, where it is held here."""
    _moved: float = field(default_factory=time.monotonic)
    _seen: int = -1

    def steps(self) -> list[Step]:
        """The steps that all ranks have done."""
        notes = [_read(self.job.folder / f"rank{r}.jsonl") for r in range(len(self.processes))]
        together = [_together(lines) for lines in zip(*notes, strict=False)]
        if together and together[-1].number > self._seen:
            self._seen, self._moved = together[-1].number, time.monotonic()
        return together

    def error(self) -> str | None:
        """Why they do not go on by themselves, if so."""
        ended = [rank for rank, process in enumerate(self.processes) if process.poll() is not None]
        if ended:
            time.sleep(1.0)  # the one that is to blame may be about to end
            return "; ".join(dict.fromkeys(self._last_words(rank) for rank in ended))
        if time.monotonic() > self._moved + _MOST_SECONDS_WITHOUT_A_STEP:
            return f"no step for {_MOST_SECONDS_WITHOUT_A_STEP:.0f} s"
        return None

    def end(self) -> None:
        """Kill what is left of them."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self.processes:
            process.communicate()
        self.store = None

    def _last_words(self, rank: int) -> str:
        code = self.processes[rank].poll()
        log = (self.job.folder / f"rank{rank}.log").read_text(errors="replace")
        lines = [line.strip().removeprefix(f"[rank{rank}]: ") for line in log.splitlines()]
        lines = [line.strip() for line in lines if line.strip(" ^~")]
        if code is not None and code < 0:
            what = [line for line in lines if "what():" in line]
            return f"{signal.Signals(-code).name}: {(what or lines or ['no word'])[-1]}"
        if not lines or not code:
            return f"rank {rank} left with {code}"
        return lines[-1] if ":" in lines[-1] else f"{lines[-1]} at {lines[-2]}"


def start(job: Job, hosts: Sequence[Host] | int) -> Ranks:
    """Start the job on hosts, a rank each, or on so many ranks of this machine."""
    path = job.write()
    ranks = Ranks(job)
    try:
        if isinstance(hosts, int):
            ranks.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ranks.store.port)}
            meet |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
            for rank in range(hosts):
                place = _place(rank, hosts, local_rank=rank, local_size=hosts)
                ranks.processes.append(_start(subprocess.Popen, path, rank, place | meet))
        else:
            meet = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(_PORT)}
            meet |= {"GLOO_SOCKET_IFNAME": "eth0"}
            for rank, host in enumerate(hosts):
                place = _place(rank, len(hosts), local_rank=0, local_size=1)
                ranks.processes.append(_start(host.popen, path, rank, place | meet))
    except BaseException:
        ranks.end()
        raise
    return ranks


def run(job: Job, hosts: Sequence[Host] | int, enough: Callable[[list[Step]], bool]) -> Outcome:
    """Train until there have been ``enough`` steps, or until it fails."""
    ranks = start(job, hosts)
    try:
        while True:
            time.sleep(_POLL_S)
            steps = ranks.steps()
            if steps and enough(steps):
                return Outcome(job.way, steps)
            if (error := ranks.error()) is not None:
                return Outcome(job.way, ranks.steps(), error)
    finally:
        ranks.end()


def _place(rank: int, size: int, *, local_rank: int, local_size: int) -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank,
               "LOCAL_WORLD_SIZE": local_size}  # fmt: skip
    return {name: str(number) for name, number in numbers.items()}


def _start(
    popen: Callable[..., subprocess.Popen[bytes]], job: Path, rank: int, place: dict[str, str]
) -> subprocess.Popen[bytes]:
    paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ, **place, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)
    }  # fmt: skip
    with open(job.with_name(f"rank{rank}.log"), "wb") as log:
        return popen(
            [sys.executable, "-m", "wiring.rank", str(job)],
            cwd=BENCHMARKS, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log,
        )  # fmt: skip


def _read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may just be written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]


def _together(lines: Sequence[dict[str, Any]]) -> Step:
    def mean(key: str) -> float | None:
        values = [line.get(key) for line in lines]
        return None if None in values else sum(values) / len(values)

    kernel, packets = mean("kernel"), mean("packets")
    assert kernel is not None
    assert packets is not None
    return Step(
        number=lines[0]["step"],
        time=lines[0]["time"],
        loss=mean("loss"),
        kernel=kernel,
        packets=packets,
        counted=mean("counted"),
        held_out=mean("held_out"),
    )
