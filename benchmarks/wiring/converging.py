"""Trainings side by side, each to a set loss, and what their numbers of steps come to."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from checkpointing import report

from wiring.running import Job, Ranks, Step, start
from wiring.task import Task
from wiring.ways import Way

TASK = Task(layers=4, heads=5, width=160, context=64, global_batch=16, lr=1e-3, warmup=20)
TARGET = 2.1
BASE = "none"
_POLL_S = 0.5
_WINDOW = 50
_KEPT_EVERY = 10


@dataclass(frozen=True)
class Run:
    """One training. ``losses`` are means over the last steps, at every tenth step."""

    setting: str
    seed: int
    ranks: int
    target: float
    steps: int
    reached: int | None
    """The first step at which the loss was at the target."""
    finished: bool
    """Whether it ended by itself: at the target, after the most steps, or by an error."""
    seconds: float
    losses: list[float]
    bytes_a_step: float | None = None
    error: str | None = None

    @property
    def key(self) -> str:
        """What another run would have to share to be the same one."""
        return f"{self.setting} seed {self.seed} ranks {self.ranks} to {self.target}"


@dataclass(frozen=True)
class Row:
    """A setting over all its seeds."""

    setting: str
    ranks: int
    seeds: int
    reached: int
    """How many seeds got there."""
    steps: list[int]
    ratios: list[float]
    """Steps to those of no compression, seed by seed."""
    loss_then: float | None
    """The mean loss at the step at which no compression was at the target."""
    bytes_a_step: float | None
    errors: list[str]

    def cells(self) -> tuple[str, ...]:
        """As a row of the table."""
        count = str(self.seeds) if self.reached == self.seeds else f"{self.reached} of {self.seeds}"
        ratios = self.ratios
        return (
            self.setting,
            str(self.ranks),
            count,
            f"{statistics.fmean(self.steps):.0f}" if self.steps else "-",
            f"{statistics.fmean(ratios):.3f}" if ratios else "-",
            f"{min(ratios):.3f} … {max(ratios):.3f}" if ratios else "; ".join(self.errors) or "-",
            f"{self.loss_then:.3f}" if self.loss_then is not None else "-",
            f"{self.bytes_a_step / 1000:.1f}" if self.bytes_a_step is not None else "-",
        )


def pool(ways: Sequence[Way], options: argparse.Namespace, folder: Path) -> Iterator[Run]:
    """Train each way with each seed, some at a time; runs come as they end.

    When the time is over, or whoever asks stops asking, those under way end as they are.
    """
    deadline = time.monotonic() + options.limit if options.limit else float("inf")
    waiting = [(way, seed) for seed in options.seeds for way in ways]
    going: list[_Going] = []
    device = "cuda:0" if options.device == "cuda" else options.device
    try:
        while (waiting or going) and time.monotonic() < deadline:
            while waiting and len(going) < options.jobs:
                way, seed = waiting.pop(0)
                where = folder / f"{len(waiting)}"
                job = Job(way, replace(TASK, seed=seed), where, device)
                going.append(_Going(start(job, options.ranks), time.monotonic()))
            time.sleep(_POLL_S)
            for one in list(going):
                run = one.look(options)
                if run.finished:
                    going.remove(one)
                    one.ranks.end()
                    yield run
        for one in going:
            yield one.look(options)
        if waiting or going:
            report.console.print(f"out of time: {len(going)} cut short, {len(waiting)} not begun")
    finally:
        for one in going:
            one.ranks.end()


@dataclass
class _Going:
    """A training under way."""

    ranks: Ranks
    began: float

    def look(self, options: argparse.Namespace) -> Run:
        """How far it is."""
        steps = self.ranks.steps()
        means = smoothed(steps)
        reached = next((n for n, loss in means.items() if loss <= options.target), None)
        error = None if reached is not None else self.ranks.error()
        done = steps[-1].number if steps else 0
        job = self.ranks.job
        counted, settled = None, job.way.settled_after
        if done > settled and steps[-1].counted is not None:
            counted = (steps[-1].counted - (steps[settled].counted or 0)) / (done - settled)
        return Run(
            setting=job.way.name,
            seed=job.task.seed,
            ranks=len(self.ranks.processes),
            target=options.target,
            steps=done,
            reached=reached,
            finished=reached is not None or error is not None or done >= options.most,
            seconds=time.monotonic() - self.began,
            losses=[round(loss, 4) for n, loss in means.items() if n % _KEPT_EVERY == 0],
            bytes_a_step=counted,
            error=error,
        )


def smoothed(steps: Sequence[Step]) -> dict[int, float]:
    """The mean loss of the last steps, by step, from the first one that has enough before it."""
    losses = [step.loss for step in steps if step.loss is not None]
    return {
        number: statistics.fmean(losses[number - _WINDOW : number])
        for number in range(_WINDOW, len(losses) + 1)
    }


def say(run: Run) -> None:
    """One line, as a run ends."""
    what = f"reached {run.target} after {run.reached} steps"
    if run.reached is None:
        last = f"{run.losses[-1]:.3f}" if run.losses else "unknown"
        what = run.error or f"loss {last} after {run.steps} steps"
    where = f"{run.setting}, seed {run.seed}, {run.ranks} ranks"
    report.console.print(f"{where}: {what} ({run.seconds:.0f} s)", markup=False, soft_wrap=True)


def summary(runs: Iterable[Run]) -> list[Row]:
    """A row for each setting and number of ranks, in the order in which they came."""
    runs = [run for run in runs if run.finished]
    base = {(r.seed, r.ranks, r.target): r.reached for r in runs if r.setting == BASE}
    groups: dict[tuple[str, int], list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.ranks):
        groups.setdefault((run.setting, run.ranks), []).append(run)
    return [_row(setting, ranks, own, base) for (setting, ranks), own in groups.items()]


def _row(
    setting: str,
    ranks: int,
    runs: Sequence[Run],
    base: dict[tuple[int, int, float], int | None],
) -> Row:
    ratios, then = [], []
    for run in runs:
        steps = base.get((run.seed, run.ranks, run.target))
        if steps is None:
            continue
        if run.reached is not None:
            ratios.append(run.reached / steps)
        at = steps // _KEPT_EVERY - _WINDOW // _KEPT_EVERY
        if at < len(run.losses):
            then.append(run.losses[at])
    sent = [run.bytes_a_step for run in runs if run.bytes_a_step is not None]
    return Row(
        setting=setting,
        ranks=ranks,
        seeds=len(runs),
        reached=sum(run.reached is not None for run in runs),
        steps=[run.reached for run in runs if run.reached is not None],
        ratios=ratios,
        loss_then=statistics.fmean(then) if then else None,
        bytes_a_step=statistics.fmean(sent) if sent else None,
        errors=[run.error for run in runs if run.error is not None],
    )
