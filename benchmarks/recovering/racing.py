"""One way to train, killed several times, and what each kill cost it."""

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
from chaotic.notes import Notes, StepNote
from chaotic.work import STEPS_FILE

from paceline.checkpoint.memory.segment_files import free_run
from paceline.testing.processes import command_line, is_alive, pids, was_started_with
from recovering import task

BENCHMARKS = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
TAG = "PACELINE_BENCH_RUN"
RANK = 1  # the one that is killed
_PATIENCE_S = 180.0
_IDLE_S = 2.0


class StandsStill(Exception):
    """A way to train did not go on by itself."""


@dataclass
class Kill:
    """What a kill cost: seconds to the next step that was done, and to the first new one."""

    step: int
    next_step: float
    new_step: float
    repeated: int
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Way:
    """A way to train: its name in the table, and its command given a folder of its own."""

    name: str
    command: Callable[[Path, int], list[str]]
    explains: Callable[[Path, float, float], dict[str, float]] | None = None
    """What the time went for between two moments, where the run in a folder can tell."""
    standbys: int = 0
    """How many processes stand by once it has trained for a while."""


class Race:
    """A way to train while it runs."""

    def __init__(self, way: Way, folder: Path, every: int) -> None:
        self.way, self.folder, self.every = way, folder, every
        folder.mkdir(parents=True)
        self.notes = Notes(folder / "steps.jsonl")
        self.tag = uuid.uuid4().hex
        paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {
            **os.environ,
            STEPS_FILE: str(self.notes.path),
            TAG: self.tag,
            task.FOLDER: str(folder / "checkpoints"),
            task.EVERY: str(every),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        (folder / "checkpoints").mkdir()
        self._process: subprocess.Popen[bytes] | None = None
        self._standbys: dict[int, int] = {}
        self._changed = 0.0

    @contextlib.contextmanager
    def going(self) -> Iterator[Race]:
        """Started, and ended with all its processes in the end."""
        with open(self.folder / "output.log", "wb") as output:
            self._process = subprocess.Popen(
                self.way.command(self.folder, self.every), env=self.environment, cwd=BENCHMARKS,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        try:
            yield self
        finally:
            while found := self.processes():
                for pid in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
            self._process.wait()
            free_run(self.folder / "run" / "checkpoints")  # a killed run leaves it for the next

    def processes(self) -> list[int]:
        """Every live process of this run."""
        found = [pid for pid in pids() if pid != os.getpid() and is_alive(pid)]
        return [pid for pid in found if was_started_with(pid, TAG, self.tag)]

    def kill(self, settle: float) -> Kill:
        """Let it train for ``settle`` seconds and until all who stand by are ready, then kill.

        The kill comes half way between two saves.
        """
        self._wait(lambda: len(self.notes.ranks()) == 2)
        start = self.notes.ranks()[0].start
        begun = min(note.time for note in self.notes.all if note.start == start)
        self._wait(lambda: time.time() > begun + settle)
        self._wait(self._standbys_idle)
        self._wait(lambda: self.notes.step % self.every == self.every // 2)
        since = time.time()
        os.kill(self.notes.ranks()[RANK].pid, signal.SIGKILL)
        first = self._wait(lambda: self._first_after(since, start))
        reached = max(note.step for note in self.notes.all if note.start == start)
        fresh = self._wait(lambda: self._first_after(since, start, beyond=reached))
        again = {n.step for n in self.notes.all if n.start == first.start and n.step <= reached}
        phases = {}
        if self.way.explains is not None:
            phases = self.way.explains(self.folder, since, first.time)
        return Kill(reached, first.time - since, fresh.time - since, len(again), phases)

    def _standbys_idle(self) -> bool:
        """Whether all standbys are there and have nothing left to load."""
        if not self.way.standbys:
            return True
        time.sleep(0.2)  # looking through all processes takes a core from those that train
        ranks = {note.pid for note in self.notes.all}  # some of which stood by before
        standing_by = [p for p in self.processes() if "--standby" in command_line(p)]
        now = {pid: _cpu_ticks(pid) for pid in standing_by if pid not in ranks}
        idle = len(now) == self.way.standbys and now == self._standbys
        if now != self._standbys:
            self._standbys, self._changed = now, time.monotonic()
        return idle and time.monotonic() > self._changed + _IDLE_S

    def _first_after(self, since: float, start: str, beyond: int = 0) -> StepNote | None:
        """The first step of another world than ``start``, beyond a step."""
        for note in self.notes.all:
            if note.time > since and note.start != start and note.step > beyond:
                return note
        return None

    def _wait(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + _PATIENCE_S
        while not (found := condition()):
            assert self._process is not None
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.way.name} ended with {self._process.returncode}: "
                                   f"see {self.folder}/output.log")  # fmt: skip
            if time.monotonic() > deadline:
                raise StandsStill(f"{self.way.name}: no step for {_PATIENCE_S:.0f} s")
            time.sleep(0.005)
            self.notes.read()
        return found


def _cpu_ticks(pid: int) -> int:
    """The time that a process has used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def torchrun(module: str) -> Callable[[Path, int], list[str]]:
    """A module under torchrun, which starts its ranks again as often as it takes."""
    arguments = ["--standalone", "--nproc-per-node=2", "--max-restarts=1000", "-m", module]
    return lambda folder, every: [str(BIN / "torchrun"), *arguments]


def paceline(settings: dict[str, Any]) -> Callable[[Path, int], list[str]]:
    """Paceline with these settings of ``checkpoint`` and of ``launch``."""

    def command(folder: Path, every: int) -> list[str]:
        config = {
            "name": "recovery",
            "model": {"target": "paceline.models.gpt:GPT", "args": task.MODEL},
            "loss": {"target": "paceline.models.gpt:token_cross_entropy"},
            "data": {"target": "recovering.task:Tokens"},
            "optimizer": {"name": "chaotic.work:NotingAdamW", "lr": task.LR},
            "schedule": {"name": "constant"},
            "batch": {"global_batch": task.GLOBAL_BATCH},
            "train": {"steps": task.STEPS, "clip_norm": None},
            "checkpoint": {"every": every, **settings.get("checkpoint", {})},
            "launch": {"device": "cpu", "max_restarts": 1000, **settings.get("launch", {})},
            "layout": "dp=2",
            "track": {"progress": False},
        }
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        return [str(BIN / "paceline"), "train", str(file), "--run-dir", str(folder / "run")]

    return command
