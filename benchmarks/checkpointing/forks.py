"""Ranks forked from this process: torch is imported once, and a rank starts in milliseconds.

The process that forks must not have started threads of torch's: keep tensors small in it, or set
``OMP_NUM_THREADS=1`` before torch is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

Say = Callable[..., None]
"""Tells the parent something: fields of a message."""


class Here:
    """A rank's place, inside it. ``say`` reaches ``Rank.hear`` of the parent."""

    def __init__(self, rank: int, world: int, store: Path, say: Say) -> None:
        self.rank, self.world, self.say = rank, world, say
        self._store = store

    def group(self, timeout: float = 30.0) -> dist.ProcessGroup | None:
        """A Gloo group of all ranks of its own; ``None`` for one rank."""
        if self.world == 1:
            return None
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(self._store), self.world),
                rank=self.rank,
                world_size=self.world,
                timeout=timedelta(seconds=timeout),
            )
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))


class Rank:
    """A forked rank, seen from the parent."""

    def __init__(self, pid: int, pipe: int, log: Path) -> None:
        self.pid, self.log = pid, log
        self.status: int | None = None
        self._pipe, self._rest, self._waiting = pipe, b"", list[dict[str, Any]]()
        self._open = True

    def hear(self, timeout: float) -> dict[str, Any] | None:
        """The next message; ``None`` when the rank has ended. Raises after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while not self._waiting and self._open:
            if not select.select([self._pipe], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise TimeoutError(f"rank with pid {self.pid} said nothing for {timeout} s")
            data = os.read(self._pipe, 65536)
            self._open = bool(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._waiting += [json.loads(line) for line in lines]
        return self._waiting.pop(0) if self._waiting else None

    def hear_all(self, timeout: float) -> list[dict[str, Any]]:
        """All that it says until it ends."""
        return list(iter(lambda: self.hear(timeout), None))

    def kill(self) -> None:
        """SIGKILL; no harm when it has ended."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """The exit code, negative for a signal."""
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    def close(self) -> None:
        """End it, if it has not ended, and forget what it said."""
        self.kill()
        self.wait()
        os.close(self._pipe)


@contextlib.contextmanager
def forked(function: Callable[..., None], world: int, *arguments: Any) -> Iterator[list[Rank]]:
    """``function(here, *arguments)`` on ``world`` ranks. None of them outlives the block."""
    with tempfile.TemporaryDirectory(prefix="paceline-forks-") as folder:
        ranks: list[Rank] = []
        try:
            for rank in range(world):
                ranks.append(_fork(function, rank, world, Path(folder), ranks, arguments))
            yield ranks
        finally:
            for one in ranks:
                one.kill()
            for one in ranks:
                one.close()


def results(function: Callable[..., Any], world: int, *arguments: Any, timeout: float = 120) -> Any:
    """Run ``function(here, *arguments)`` on all ranks to its end; what each returns, by rank."""

    def run(here: Here, *given: Any) -> None:
        here.say(result=function(here, *given))

    with forked(run, world, *arguments) as ranks:
        said = [one.hear_all(timeout) for one in ranks]
        for one in ranks:
            if one.wait() != 0:
                raise RuntimeError(f"a rank failed:\n{one.log.read_text()}")
        return [messages[-1]["result"] for messages in said]


def _fork(
    function: Callable[..., None],
    rank: int,
    world: int,
    folder: Path,
    others: list[Rank],
    arguments: Any,
) -> Rank:
    mine, theirs = os.pipe()
    log = folder / f"log-{rank}"
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return Rank(pid, mine, log)
    code = 1
    try:
        os.close(mine)
        for other in others:
            os.close(other._pipe)
        output = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ |= {name: str(value) for name, value in place.items()}  # as a launcher does

        def say(**fields: Any) -> None:
            os.write(theirs, json.dumps(fields).encode() + b"\n")

        function(Here(rank, world, folder / "store", say), *arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise AssertionError("not reached")
