"""A pool of live ranks: processes that have imported torch and wait for work.

A multi-rank test then costs milliseconds. Ranks are forked from one server process (see
``paceline.testing.server``), so that replacing one that crashed is cheap as well.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

from paceline.testing.job import JobRun, server_environment
from paceline.testing.live_ranks import LiveRank, RankServer
from paceline.testing.pickling import pickle_call

DEFAULT_TIMEOUT = 60.0
"""Seconds a job may take before its ranks are stopped and their stacks shown."""

# What most jobs come to import, so that it is imported once and not by every new rank. Optimizers
# and DDP import dynamo on use.
_PRELOAD = ("paceline.testing.rank", "torch._dynamo", "paceline.trainer", "paceline.models.gpt")


class RankPool:
    """Live ranks, ready to run functions together. Also a context manager.

    ``preload`` names modules to import once, in the process ranks are forked from. The pool starts
    on its first ``run``; nothing of it outlives ``close`` or the process that made it.
    """

    def __init__(self, *, preload: Sequence[str] = (), timeout: float = DEFAULT_TIMEOUT) -> None:
        self._timeout = _checked_timeout(timeout)
        self._preload = (*_PRELOAD, *preload)
        self._server: RankServer | None = None
        self._ranks: list[LiveRank] = []
        self._jobs = 0
        self._owner = os.getpid()
        self._lock = threading.Lock()
        atexit.register(self.close)

    @property
    def server_pid(self) -> int | None:
        """The process id of the server, the parent of every rank; ``None`` before the first run."""
        return None if self._server is None else self._server.pid

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        world_size: int,
        timeout: float | None = None,
        join: bool = True,
        device: str = "cpu",
        share_gpu: bool = False,
    ) -> list[Any]:
        """Call ``function(*arguments)`` on ``world_size`` ranks at once; their results, by rank.

        Each rank has joined a ``World`` on ``device``; with ``join=False`` it only
        has the launcher's variables (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, …) in its
        environment. Ranks see this process's environment, working directory and ``sys.path`` as
        they are now, and start every job with the same random state. On ``device="cuda"`` each
        rank needs a GPU of its own; with ``share_gpu=True`` more ranks than there are GPUs share
        them, over NCCL.

        The function may be a closure or a lambda. It, its arguments and its result travel as
        pickles. What a job changes in its rank (environment, random state, default dtype, signal
        handlers, process group, …) is put back after it. What it prints is printed here.

        When a rank raises, exits, crashes or outlasts ``timeout`` seconds (default: the pool's),
        ``RankFailed`` is raised for the first that did, with its traceback,
        and with the original exception as its cause. The ranks of that job are replaced.
        """
        __tracebackhide__ = True  # pytest shows the rank's error, not how it came here
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ValueError(f"world_size={world_size!r} must be a whole number, 1 or more.")
        limit = self._timeout if timeout is None else _checked_timeout(timeout)
        call = pickle_call(function, arguments)
        with self._lock:
            ranks = self._ready(world_size)
            assert self._server is not None
            self._jobs += 1
            job = JobRun(ranks, self._server, self._jobs, limit)
            try:
                return job.results(call, join=join, device=device, share_gpu=share_gpu)
            finally:
                _show_output(ranks)
                self._retire(job.unfit)

    def close(self) -> None:
        """End every rank and the server. A later ``run`` starts afresh."""
        if os.getpid() != self._owner:
            return  # a forked copy must not end its parent's ranks
        self._retire(list(self._ranks))
        if self._server is not None:
            self._server.close()
            self._server = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _ready(self, count: int) -> list[LiveRank]:
        """``count`` ranks that wait for work, forked as needed."""
        if self._server is not None and not self._server.is_alive:
            self.close()  # something killed it, and so the ranks
        # A rank that waits has nothing to say: one that is readable has ended.
        self._retire([rank for rank in self._ranks if wait(rank.signs, 0)])
        if self._server is None:
            self._server = RankServer(self._preload, server_environment())
        while len(self._ranks) < count:
            self._ranks.append(self._server.fork())
        return self._ranks[:count]

    def _retire(self, ranks: Iterable[LiveRank]) -> None:
        for rank in ranks:
            assert self._server is not None
            self._ranks.remove(rank)
            self._server.kill(rank)
            rank.release()


def run_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    world_size: int,
    timeout: float = DEFAULT_TIMEOUT,
    join: bool = True,
    device: str = "cpu",
    share_gpu: bool = False,
) -> list[Any]:
    """Run one function on ranks of its own, without pytest; see ``RankPool.run``.

    Starting the ranks takes as long as importing torch. For more than one call, keep a
    ``RankPool``.
    """
    with RankPool(timeout=timeout) as pool:
        return pool.run(
            function,
            *arguments,
            world_size=world_size,
            join=join,
            device=device,
            share_gpu=share_gpu,
        )


def _show_output(ranks: list[LiveRank]) -> None:
    for number, rank in enumerate(ranks):
        for line in rank.output().splitlines():
            print(f"[rank {number}] {line}", file=sys.stdout)


def _checked_timeout(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ValueError(f"timeout={timeout!r} must be a number of seconds above 0.")
    return timeout
