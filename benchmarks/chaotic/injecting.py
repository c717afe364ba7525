"""Making each kind of fault happen, and seeing the run recover from it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chaotic.cluster import Cluster, Launcher, Stuck
from chaotic.notes import StepNote, repeated
from chaotic.schedule import Fault
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.manifest import MANIFEST
from paceline.events import CheckpointFailed, read

_BLINK_S = 1.0
_SLOW_S = 3.0
# Faults after which the same world goes on, if all is well.
_HARMLESS = ("blink", "slow link", "full disk")


@dataclass
class Outcome:
    """What a fault cost the run, which had done ``step`` steps by then.

    ``next_step`` is the time to the next step of a new world, or to the next new step where the
    old one went on; ``seconds`` to the first step that had not been done before. ``lost`` is that
    time less what the steps would have taken anyhow.
    """

    kind: str
    detail: str
    step: int
    next_step: float
    seconds: float
    lost: float
    repeated: int
    restarted: bool


class Injector:
    """Lets faults happen to the run of a cluster, one after the other.

    A cut link stays cut for ``cut_s``; an undisturbed step takes ``step_s``.
    """

    def __init__(self, cluster: Cluster, *, cut_s: float, step_s: float) -> None:
        self.cluster = cluster
        self.cut_s, self.step_s = cut_s, step_s
        self._damaged: set[tuple[Path, int]] = set()
        self._actions: dict[str, Callable[[Fault], str]] = {
            "kill rank": self._kill_rank,
            "stop rank": self._stop_rank,
            "kill launcher": self._kill_launcher,
            "cut link": self._cut_link,
            "blink": self._blink,
            "slow link": self._slow_link,
            "damage": self._damage,
            "full disk": self._full_disk,
            "preempt": self._preempt,
        }

    def happen(self, fault: Fault) -> Outcome:
        """Wait for the step of the fault, let it happen, wait for the run to be past it."""
        cluster, notes = self.cluster, self.cluster.notes
        cluster.wait(f"step {fault.step}", lambda: notes.step >= fault.step or cluster.done)
        self._wait_for_all_ranks()
        if cluster.done:
            raise Stuck(f"the run ended before fault {fault.number} ({fault.kind})")
        time.sleep(fault.wait)
        cluster.tend()
        before, since, step = notes.ranks()[0].start, time.time(), notes.step
        detail = self._actions[fault.kind](fault)
        if fault.kind in _HARMLESS:
            reached = notes.step
            after = first = cluster.wait("further step", lambda: self._first(since, reached))
        else:
            first = cluster.wait("new world", lambda: self._first(since, 0, before))
            reached = max(note.step for note in notes.all if note.start == before)
            after = cluster.wait("new step", lambda: self._first(since, reached, before))
        restarted = after.start != before
        seconds = after.time - since
        return Outcome(
            kind=fault.kind,
            detail=detail,
            step=reached,
            next_step=first.time - since,
            seconds=seconds,
            lost=max(0.0, seconds - self.step_s * (after.step - step)),
            repeated=repeated(notes.all, after.start, reached) if restarted else 0,
            restarted=restarted,
        )

    def _first(self, since: float, beyond: int, other_than: str = "") -> StepNote | None:
        """The first line after a moment, of a step beyond one and of another world than one."""
        for note in self.cluster.notes.all:
            if note.time > since and note.step > beyond and note.start != other_than:
                return note
        return None

    def _wait_for_all_ranks(self) -> None:
        """A world that has just formed: every rank has said where it is."""
        notes = self.cluster.notes
        self.cluster.wait("line of every rank", lambda: self._complete(notes.ranks()))

    @staticmethod
    def _complete(ranks: dict[int, StepNote]) -> bool:
        return bool(ranks) and len(ranks) == next(iter(ranks.values())).size

    # Faults. Each returns what was hit.

    def _rank(self, fault: Fault) -> StepNote:
        ranks = self.cluster.notes.ranks()
        return ranks[fault.where % len(ranks)]

    def _launcher(self, fault: Fault) -> Launcher:
        return self.cluster.launchers[fault.where % len(self.cluster.launchers)]

    def _kill_rank(self, fault: Fault) -> str:
        rank = self._rank(fault)
        os.kill(rank.pid, signal.SIGKILL)
        return f"rank {rank.rank} on {rank.host}"

    def _stop_rank(self, fault: Fault) -> str:
        rank = self._rank(fault)
        os.kill(rank.pid, signal.SIGSTOP)
        return f"rank {rank.rank} on {rank.host}"

    def _kill_launcher(self, fault: Fault) -> str:
        launcher = self._launcher(fault)
        assert launcher.process is not None
        launcher.process.kill()
        return launcher.host.name

    def _preempt(self, fault: Fault) -> str:
        launcher = self._launcher(fault)
        assert launcher.process is not None
        exits = len(launcher.exits)
        launcher.process.send_signal(signal.SIGTERM)
        self.cluster.wait("launcher to leave", lambda: len(launcher.exits) > exits)
        if launcher.exits[-1] != 128 + signal.SIGTERM:
            raise Stuck(f"{launcher.host.name} left with {launcher.exits[-1]}, not 143")
        return launcher.host.name

    def _cut_link(self, fault: Fault) -> str:
        return self._without_link(fault, self.cut_s)

    def _blink(self, fault: Fault) -> str:
        return self._without_link(fault, _BLINK_S)

    def _without_link(self, fault: Fault, seconds: float) -> str:
        host = self._launcher(fault).host
        host.cut()
        self._pass(seconds)
        host.heal()
        return f"{host.name} for {seconds:g} s"

    def _slow_link(self, fault: Fault) -> str:
        host = self._launcher(fault).host
        host.delay(40)
        host.drop(1)
        self._pass(_SLOW_S)
        host.delay(0)
        host.drop(0)
        return f"{host.name} for {_SLOW_S:g} s"

    def _pass(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.cluster.wait("time", lambda: time.monotonic() > until)

    def _damage(self, fault: Fault) -> str:
        """A byte of the newest checkpoint changes, and nothing newer is left to go on from."""
        self.cluster.wait("two good checkpoints", lambda: len(self._undamaged()) > 1)
        for launcher in self.cluster.launchers:
            if launcher.process is not None:
                launcher.process.kill()
            launcher.host.kill()
            launcher.host.run(["find", "/dev/shm", "-mindepth", "1", "-delete"], check=True)
        newest, manifest_time = self._undamaged()[-1]
        self._damaged.add((newest, manifest_time))
        largest = max(newest.iterdir(), key=lambda file: file.stat().st_size)
        with open(largest, "r+b") as file:
            file.seek(fault.where * 997 % largest.stat().st_size)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0xFF]))
        return f"{newest.name}/{largest.name}"

    def _undamaged(self) -> list[tuple[Path, int]]:
        """The checkpoints that were not damaged since they were written."""
        found = [Path(one.path) for one in Folder(self.cluster.disk).checkpoints()]
        dated = [(path, (path / MANIFEST).stat().st_mtime_ns) for path in found]
        return [one for one in dated if one not in self._damaged]

    def _full_disk(self, fault: Fault) -> str:
        """The disk is full until a save has failed; the run goes on meanwhile."""
        failed = self._failed_saves()
        filler = self.cluster.disk / "filler"
        try:
            with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 16))
            self.cluster.wait("save that fails", lambda: self._failed_saves() > failed, 60)
        finally:
            filler.unlink()
        return f"{self._failed_saves() - failed} failed saves"

    def _failed_saves(self) -> int:
        return sum(isinstance(e, CheckpointFailed) for e in read(self.cluster.run_dir))
