"""A run that saves and is killed while it does: what its ranks do, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import paceline.checkpoint
from checkpointing.forks import Here
from checkpointing.states import (
    Shapes,
    differing,
    gpt_shapes,
    redraw,
    rows_in,
    state_of,
    whole_parts,
    whole_tensors,
)
from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.manifest import MANIFEST
from paceline.checkpoint.retention import Keep
from paceline.checkpoint.sharded.async_saver import AsyncSaver
from paceline.checkpoint.sharded.save_load import load
from paceline.errors import CheckpointError

CODE = str(Path(paceline.checkpoint.__file__).parent)
KEEP = Keep(last=2)
PHASES = (
    "before the first file",
    "files half written",
    "files whole, no manifest",
    "manifest half written",
    "manifest in place",
)


@dataclass(frozen=True)
class Plan:
    """How a run saves and ends. The last of its saves is the one to be killed in.

    ``again``: the last save is one more of the step before, with other values. ``line``: the rank
    ``victim`` kills itself when it comes to this line of the checkpoint code for the n-th time.
    """

    world: int
    number: int
    saves: int = 2
    again: bool = False
    victim: int = 0
    line: tuple[str, int] | None = None

    def attempt(self, save: int) -> int:
        """A number that no other save of any run has."""
        return self.number * 10 + save


def shapes_for(megabytes: int) -> Shapes:
    """A GPT with Adam of about this size."""
    width = 64
    while 12 * 12 * width**2 < megabytes * 10**6:
        width += 4
    return gpt_shapes(layers=1, width=width)


def seed_of(step: int, attempt: int) -> int:
    return step * 1_000_003 + attempt


class Lines:
    """Counts the lines of checkpoint code that this process runs; kills it at one of them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.die: tuple[str, int] | None = None

    def __enter__(self) -> Lines:
        self.counts.clear()
        threading.settrace(self._call)  # for the saver's thread
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(CODE) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            self.counts[line] += 1
            if self.die == (line, self.counts[line]):
                os.kill(os.getpid(), signal.SIGKILL)
        return self._line


def run(here: Here, where: str, shapes: Shapes, plan: Plan, traced: bool) -> None:
    """What a rank does: take the folder, go on from the newest state, save ``plan.saves`` times."""
    torch.set_num_threads(1)
    group = here.group(timeout=20)
    folder = Folder(where)
    if here.rank == 0:
        lock = folder.lock("killed again and again")
        here.say(cleaned=folder.clean())
    if group is not None:
        dist.barrier(group)
    step = 0
    tensors = whole_tensors(shapes, 0)
    if (good := folder.newest_good()) is not None:
        load(good, whole_parts(tensors), group)
        check(good, tensors, shapes)
        step = good.step
    here.say(resumed=step)
    saver = AsyncSaver(folder, group, KEEP)
    lines = Lines()
    for save in range(plan.saves):
        last = save == plan.saves - 1
        step += not (last and plan.again)
        lines.die = plan.line if last and plan.victim == here.rank else None
        attempt = plan.attempt(save)
        redraw(tensors, seed_of(step, attempt))
        objects = {"loop": {"step": step, "attempt": attempt}} if here.rank == 0 else {}
        rows = rows_in(tensors, here.rank, here.world)
        state = state_of(rows, shapes, here.rank, here.world, objects)
        here.say(begin=step, attempt=attempt, last=last)
        if traced:
            with lines:
                saver.save(step, state, {"attempt": attempt})
                redraw(tensors, -1)  # training goes on: what is saved must not change with it
                [outcome] = saver.wait()
        else:
            saver.save(step, state, {"attempt": attempt})
            redraw(tensors, -1)
            [outcome] = saver.wait()
        here.say(
            done=step,
            attempt=attempt,
            error=outcome.error,
            seconds=outcome.seconds,
            lines=dict(lines.counts),
            strays=strays(folder) if here.rank == 0 and not last else [],
        )
    saver.close()
    if here.rank == 0:
        lock.release()


def check(checkpoint: Checkpoint, tensors: dict[str, Any], shapes: Shapes) -> tuple[int, int]:
    """Raise unless ``tensors`` are what was saved; the step and the attempt they are of."""
    loop = checkpoint.read_object("loop")
    if loop["step"] != checkpoint.step:
        raise CheckpointError(f"{checkpoint.path} holds step {loop['step']}")
    expected = whole_tensors(shapes, seed_of(loop["step"], loop["attempt"]))
    if wrong := differing(tensors, expected):
        raise CheckpointError(f"{checkpoint.path} differs from what was saved in {wrong}")
    return loop["step"], loop["attempt"]


def newest(where: str, shapes: Shapes) -> tuple[int, int]:
    """Load the newest state in one process: its step and attempt. Raises if anything is amiss."""
    told: list[str] = []
    good = Folder(where).newest_good(lambda _, text: told.append(text))
    if told:
        raise CheckpointError(f"looks finished and is not whole: {told}")
    if good is None:
        return 0, 0
    tensors = whole_tensors(shapes, 0)
    load(good, whole_parts(tensors), None)
    return check(good, tensors, shapes)


def strays(folder: Folder) -> list[str]:
    """Whatever is in the folder and not part of a finished checkpoint."""
    known = {".lock"}
    for checkpoint in folder.checkpoints():
        known |= {checkpoint.name, f"{checkpoint.name}/{MANIFEST}"}
        known |= {f"{checkpoint.name}/{file}" for file in checkpoint.manifest.files}
    root = Path(folder.where)
    return sorted({str(path.relative_to(root)) for path in root.rglob("*")} - known)


def phase(where: str, step: int, attempt: int, ranks: int, size: int) -> str:
    """How far the save of ``step`` had come, by what it left of the ``size`` bytes of all files."""
    checkpoint = Folder(where).get(step)
    folder = Path(checkpoint.path)
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if MANIFEST in names:
        if checkpoint.manifest.info["attempt"] == attempt:
            return PHASES[4]
        names -= checkpoint.manifest.files.keys()
    if any(name.endswith(".tmp") for name in names):
        return PHASES[3]
    files = [folder / name for name in names if name.endswith(".bin")]
    if not files:
        return PHASES[0]
    whole = len(files) == ranks and sum(path.stat().st_size for path in files) >= size
    return PHASES[2] if whole else PHASES[1]
