"""Many cases in one world: a rank's CUDA context and communicators take longer than a case does.

Cases of one size run one after the other on ranks that stay. Each leaves its result in a file, so
that nothing is lost where a later one hangs or crashes: that one is reported with the stack of
every rank, and the rest goes on in new ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError, RankFailed
from paceline.testing import RankPool
from paceline.world import World


@dataclass(frozen=True)
class Task:
    """``function(*arguments)`` on each of ``ranks`` ranks."""

    ranks: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


Done = Callable[[str, "list[Any] | RankFailed", float], None]
"""Told of each case: its name, the ranks' results or what went wrong, and the seconds."""


def run_all(
    tasks: Mapping[str, Task],
    pool: RankPool,
    folder: Path,
    *,
    device: str,
    gpus: int,
    limit: float,
    deadline: float,
    done: Done,
) -> None:
    """Run ``tasks``, the smallest worlds first, each for ``limit`` seconds at most.

    ``deadline`` is by ``time.monotonic()``: what has not begun by then is left out.
    """
    for ranks in sorted({task.ranks for task in tasks.values()}):
        left = [name for name, task in tasks.items() if task.ranks == ranks]
        while left and time.monotonic() < deadline:
            files = folder / f"{ranks}-{len(left)}"
            files.mkdir(parents=True)
            work = [(n, tasks[n].function, tasks[n].arguments) for n in left]
            failure: RankFailed | None = None
            try:
                pool.run(
                    _run_cases,
                    *(work, files, limit, deadline),
                    world_size=ranks,
                    device=device,
                    share_gpu=device == "cuda" and ranks > gpus,
                    timeout=limit * len(left) + 60,
                )
            except RankFailed as error:
                failure = error
            left = _collect(left, ranks, files, failure, done)


def _collect(
    names: list[str], ranks: int, files: Path, failure: RankFailed | None, done: Done
) -> list[str]:
    """Report the cases that ran, and the one that broke its ranks; those that are left."""
    for number, name in enumerate(names):
        found = [files / f"{number}.{rank}.pkl" for rank in range(ranks)]
        if all(path.exists() for path in found):
            results = [pickle.loads(path.read_bytes()) for path in found]
            errors = [result for result, _ in results if isinstance(result, BaseException)]
            seconds = max(seconds for _, seconds in results)
            done(name, _refused(errors[0]) if errors else [r for r, _ in results], seconds)
        elif failure is None:
            return []  # the time was up
        else:
            done(name, _with_stacks(failure, number, ranks, files), 0.0)
            return names[number + 1 :]
    return []


def _refused(error: BaseException) -> RankFailed:
    failure = RankFailed(str(error), rank=0, exit_code=1)
    failure.__cause__ = error
    return failure


def _with_stacks(failure: RankFailed, number: int, ranks: int, files: Path) -> RankFailed:
    lines = [str(failure)]
    for rank in range(ranks):
        path = files / f"{number}.{rank}.stack"
        if path.exists() and (stack := path.read_text(errors="replace").strip()):
            lines.append(f"rank {rank} was here:\n{stack}")
    return RankFailed("\n".join(lines), rank=failure.rank, exit_code=failure.exit_code)


def _run_cases(work: list[Any], files: Path, limit: float, deadline: float) -> None:
    """On a rank: one case after the other."""
    world = World.current()
    for number, (_, function, arguments) in enumerate(work):
        if not _go_on(world, deadline):
            return
        started = time.monotonic()
        with _limited(limit, files / f"{number}.{world.rank}.stack"):
            try:
                result = function(*arguments)
            except PacelineError as error:  # refused, by all ranks alike
                result = error
        part = files / f"{number}.{world.rank}.part"
        part.write_bytes(pickle.dumps((result, time.monotonic() - started)))
        os.rename(part, part.with_suffix(".pkl"))
        del result
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


def _go_on(world: World, deadline: float) -> bool:
    """Whether there is time for another case, as rank 0 sees it."""
    from paceline.world import collectives

    return bool(collectives.broadcast_object(time.monotonic() < deadline))


@contextlib.contextmanager
def _limited(seconds: float, stacks: Path) -> Iterator[None]:
    """End this process, with its stacks in a file, where it takes longer."""
    with open(stacks, "w") as file:
        faulthandler.dump_traceback_later(seconds, exit=True, file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
