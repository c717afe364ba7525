"""One job on live ranks: send it, wait for all, find who failed first, have them clean up."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from paceline.errors import RankFailed
from paceline.launch.environment import loopback_interfaces
from paceline.testing.live_ranks import LEAK_TAG, LiveRank, RankServer, serve_store
from paceline.testing.protocol import JobOutcome, PoolJob

_GRACE = 3.0
"""Seconds the other ranks get to end by themselves once one has failed."""
_CLEAN_UP = 60.0
"""Seconds a rank gets to clean up after a job."""
_CASCADE = 1.0
"""A crash makes its peers raise: one seen up to this long after their errors still came first."""
_OUTPUT_SHOWN = 3000

_LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass(frozen=True)
class _Crash:
    """A rank that ended without a word."""

    exit_code: int
    report: str
    time: float


class JobRun:
    """One function on some ranks, from sending it until they are ready for the next."""

    def __init__(
        self, ranks: list[LiveRank], server: RankServer, number: int, timeout: float
    ) -> None:
        self._ranks = ranks
        self._server = server
        self._number = number
        self._timeout = timeout
        self._ends: dict[int, JobOutcome | _Crash] = {}
        self._dismissed: set[int] = set()
        self._on_gpu = False
        self.unfit: set[LiveRank] = set(ranks)
        """Ranks that must not get another job: all, until they have cleaned up after this one."""

    def results(self, call: bytes, *, join: bool, device: str, share_gpu: bool) -> list[Any]:
        """Run it; the results by rank, or ``RankFailed`` for the first rank that failed."""
        __tracebackhide__ = True  # pytest shows the rank's error, not how it came here
        self._on_gpu = device.startswith("cuda")
        # A function that joins by torch's own means needs a store that nobody has used before.
        store = None if join else serve_store()
        port = self._server.store_port if store is None else store.port
        try:
            for number, rank in enumerate(self._ranks):
                job = self._job(call, number, port, join, device, share_gpu)
                rank.send(pickle.dumps(job))
            self._wait_for_ends()
            # After a failure nobody cleans up: Gloo may still be trying to reach a rank that is
            # gone, and would reach the wrong one in the next job. Fresh ranks are cheap.
            failure = self._first_failure() or self._hang() or self._clean_up()
        finally:
            del store  # and its port: an exception that is kept keeps this frame
        if failure is not None:
            raise failure
        ends: list[Any] = [self._ends[number] for number in range(len(self._ranks))]
        return [pickle.loads(end.result) for end in ends]

    def _job(
        self, call: bytes, number: int, port: int, join: bool, device: str, share_gpu: bool
    ) -> PoolJob:
        return PoolJob(
            call=call,
            environ=rank_environment(number, len(self._ranks), port),
            folder=os.getcwd(),
            path=sys.path[:],
            join=join,
            device=device,
            share_gpu=share_gpu,
            # Longer than the job's own limit: a hang is then reported here, with stacks.
            timeout=self._timeout + 60,
            number=self._number,
        )

    def _wait_for_ends(self) -> None:
        """Until every rank has reported or died, or the time is up (sooner once one failed)."""
        deadline = time.monotonic() + self._timeout
        missing = set(range(len(self._ranks)))
        while missing and self._listen(missing, deadline, self._on_end):
            missing -= self._ends.keys()
            if any(_failed(end) for end in self._ends.values()):
                deadline = min(deadline, time.monotonic() + _GRACE)
                # Those that are done may leave now: it unblocks the ones that wait for them.
                self._dismiss()

    def _listen(self, missing: set[int], deadline: float, hear: Callable[[int, Any], None]) -> bool:
        """Hear at least one of ``missing`` (``None``: it died); false when the time is up."""
        signs = {sign: n for n in missing for sign in self._ranks[n].signs}
        ready = wait(list(signs), max(0.0, deadline - time.monotonic()))
        for number in {signs[sign] for sign in ready}:
            try:
                message = self._ranks[number].receive()
            except EOFError:
                message = None
            hear(number, message)
        return bool(ready)

    def _on_end(self, number: int, message: JobOutcome | None) -> None:
        if message is not None:
            self._ends[number] = message
            return
        rank, now = self._ranks[number], time.monotonic()
        self._ends[number] = _Crash(self._server.collect(rank), rank.crash_report(), now)

    def _dismiss(self) -> None:
        """Tell the ranks that have reported to leave the world and clean up."""
        for number, end in self._ends.items():
            if number not in self._dismissed and not isinstance(end, _Crash):
                self._dismissed.add(number)
                self._ranks[number].send(b"clean up")

    def _clean_up(self) -> RankFailed | None:
        """Have the ranks that reported clean up; the first one that left something behind."""
        self._dismiss()
        missing = set(self._dismissed)
        leaks: dict[int, str] = {}

        def hear(number: int, message: tuple[list[str], bool] | None) -> None:
            missing.discard(number)
            if message is None:
                leaks[number] = "died while it cleaned up after the job"
                return
            processes, reusable = message
            if processes:
                leaks[number] = f"left behind {', '.join(processes)}"
            if reusable:
                self.unfit.discard(self._ranks[number])

        deadline = time.monotonic() + _CLEAN_UP
        while missing and self._listen(missing, deadline, hear):
            pass
        for number in missing:
            stack = self._ranks[number].stack()
            leaks[number] = f"did not finish cleaning up in {_CLEAN_UP:g} s; it is here:\n{stack}"
        if not leaks:
            return None
        first = min(leaks)
        lines = [f"rank {n} of {len(self._ranks)} {text}" for n, text in sorted(leaks.items())]
        return RankFailed("\n".join(lines), rank=first, exit_code=0)

    def _first_failure(self) -> RankFailed | None:
        failures = {n: end for n, end in self._ends.items() if _failed(end)}
        if not failures:
            return None

        def when(number: int) -> float:
            end = failures[number]
            # Torch aborts a process whose NCCL peer is gone: such a crash is what follows.
            aborted = isinstance(end, _Crash) and end.exit_code == -signal.SIGABRT and self._on_gpu
            return end.time - _CASCADE if isinstance(end, _Crash) and not aborted else end.time

        first = min(failures, key=when)
        end = failures[first]
        who = f"rank {first} of {len(self._ranks)}"
        others = self._others(first)
        if isinstance(end, _Crash):
            printed = self._ranks[first].output()[-_OUTPUT_SHOWN:].strip()
            parts = [f"{who} died: {_exit_in_words(end.exit_code)}", end.report]
            parts += [f"It had printed:\n{printed}"] if printed else []
            return RankFailed(
                "\n".join([part for part in parts if part] + others),
                rank=first,
                exit_code=end.exit_code,
                traceback=end.report,
            )
        failure = RankFailed(
            "\n".join([f"{who} raised {end.summary}", "", end.traceback.strip(), *others]),
            rank=first,
            exit_code=1,
            traceback=end.traceback,
        )
        failure.__cause__ = pickle.loads(end.error) if end.error is not None else None
        return failure

    def _hang(self) -> RankFailed | None:
        """The ranks that have not come back in time, with where they are."""
        stacks = {n: r.stack() for n, r in enumerate(self._ranks) if n not in self._ends}
        if not stacks:
            return None
        first = min(stacks)
        names = ", ".join(map(str, stacks))
        lines = [
            f"rank {names} of {len(self._ranks)} did not finish within {self._timeout:g} s and was "
            "stopped."
        ]
        lines += [f"rank {number} was here:\n{stack}" for number, stack in stacks.items()]
        return RankFailed(
            "\n".join(lines + self._others(*stacks)),
            rank=first,
            exit_code=-signal.SIGKILL,
            traceback=stacks[first],
        )

    def _others(self, *named: int) -> list[str]:
        """One line on what became of each other rank."""
        lines = []
        for number in range(len(self._ranks)):
            end = self._ends.get(number)
            if number in named:
                continue
            if end is None:
                fate = "was still running and was stopped"
            elif isinstance(end, _Crash):
                fate = f"died: {_exit_in_words(end.exit_code)}"
            elif _failed(end):
                fate = f"raised {end.summary.splitlines()[0]}"
            else:
                fate = "had finished"
            lines.append(f"(rank {number} {fate})")
        return ["", *lines] if lines else []


def server_environment() -> dict[str, str]:
    """What the server and idle ranks see: this process's environment without a launcher's place."""
    kept = {k: v for k, v in os.environ.items() if not _is_launchers(k) and k != LEAK_TAG}
    # Ranks import the same paceline as this process, however that came to be on its path.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    # Connecting to a store makes torch look up the name of this machine's own address. Where the
    # name server does not answer, do not wait for it longer than need be.
    resolver = {"RES_OPTIONS": "timeout:1 attempts:1"}
    # A module that asks while it is imported whether there is a GPU must not wake the driver in
    # the server: it does not survive a fork.
    sleeping = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return {**resolver, **sleeping, **kept, **_ONE_THREAD, "PYTHONPATH": path}


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What one rank sees during a job: this process's environment, and its own place in it."""
    environ = {k: v for k, v in os.environ.items() if not _is_launchers(k)}
    environ.update(_ONE_THREAD)
    # All ranks are here: do not depend on how this machine resolves its own name.
    environ.update(loopback_interfaces())
    environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        # The store is served already, by this process.
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    return environ


def _failed(end: JobOutcome | _Crash) -> bool:
    return isinstance(end, _Crash) or end.result is None


def _exit_in_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _is_launchers(name: str) -> bool:
    return name in _LAUNCHER_VARIABLES or name.startswith(("TORCHELASTIC_", "PET_"))
