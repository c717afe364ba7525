"""SIGKILL while saving: is there always a state to go on from, and a next run that starts?

One folder lives through all trials. In each, a run of one or two ranks takes it over, goes on from
the newest state, checks that it is bitwise-identical, saves once in peace, and is killed during its
next save (every rank, or one of two): after a random time, or at a random line of the checkpoint
code. After each kill the newest state must load, be exactly that of its step, and be no older than
what the run was told is saved; the run of the next trial must start and save, and find a folder
without leftovers.

    python benchmarks/checkpoint_kill.py [--trials 200] [--seed 0]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import argparse
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from checkpointing import report
from checkpointing.forks import forked
from checkpointing.killing import PHASES, Plan, newest, phase, run, shapes_for, strays
from checkpointing.states import Shapes, size_of

from paceline.checkpoint.folder import Folder

PATIENCE_S = 60.0


@dataclass
class Usual:
    """What an undisturbed save of so many ranks takes."""

    seconds: float = 0.0
    lines: dict[str, int] = field(default_factory=dict)


@dataclass
class Ended:
    """How a run went: what rank 0 was told is saved, and what the last save was."""

    saved: tuple[int, int] = (0, 0)
    begun: tuple[int, int] | None = None
    finished: set[int] = field(default_factory=set)
    """The ranks that were told how the last save ended before they were killed."""
    problem: str | None = None
    survivor_s: float | None = None
    strays: list[str] = field(default_factory=list)


@dataclass
class Trial:
    """A line of the report."""

    plan: Plan
    by: str
    killed: str
    phase: str = ""
    left: int = 0
    survivor_s: float | None = None
    problem: str | None = None
    """Why the newest state could not be used."""
    next_run: str | None = "not tried"
    """Why the run after it could not start or save; ``None`` where it could."""


class Bench:
    """One folder, and the trials it lives through."""

    def __init__(self, where: str, shapes: Shapes, draw: Random) -> None:
        self.where, self.shapes, self.draw = where, shapes, draw
        self.usual: dict[tuple[int, int, bool], Usual] = {}
        self.trials: list[Trial] = []
        self.missed = 0
        self._number = 0

    def warm_up(self) -> None:
        """Runs that end in peace, to know how long a save takes."""
        for world in (1, 2):
            for traced in (False, True):
                self._number += 1
                ended = self._run(Plan(world, self._number, saves=3), traced, None, [])
                assert ended.problem is None, ended.problem

    def trial(self) -> bool:
        """Kill a run; whether it was in the middle of a save, and counts."""
        draw = self.draw
        self._number += 1
        world = draw.choice((1, 2, 2))
        one = world == 2 and draw.random() < 0.5
        victim = draw.randrange(world)
        by_line = draw.random() < 0.5
        usual = self.usual[world, victim if by_line else 0, by_line]
        plan = Plan(world, self._number, again=draw.random() < 0.25, victim=victim)
        if by_line:
            line = draw.choice(sorted(usual.lines))
            plan = replace(plan, line=(line, draw.randint(1, usual.lines[line])))
        victims = [victim] if one else list(range(world))
        delay = None if by_line else draw.random() * usual.seconds
        ended = self._run(plan, by_line, delay, victims)
        self._judge_before(ended)
        if ended.problem is None and ended.finished.issuperset(victims):
            self.missed += 1
            return False
        killed = f"rank {victim} of 2" if one else f"all of {world}"
        trial = Trial(plan, "line" if by_line else "time", killed, survivor_s=ended.survivor_s)
        trial.problem = ended.problem
        self._judge(trial, ended)
        self.trials.append(trial)
        return True

    def last(self) -> None:
        """One more run, in peace, for the last trial's sake; only checkpoints may be left."""
        self._number += 1
        ended = self._run(Plan(2, self._number), False, None, [])
        self._judge_before(ended)
        left = strays(Folder(self.where))
        if left and self.trials:
            self.trials[-1].next_run = f"left {left}"

    def _judge_before(self, ended: Ended) -> None:
        """What this run shows of the trial before it: could it start and save?"""
        if self.trials and self.trials[-1].next_run == "not tried":
            problem = f"leftovers {ended.strays}" if ended.strays else ended.problem
            self.trials[-1].next_run = None if ended.saved != (0, 0) and not problem else problem

    def _judge(self, trial: Trial, ended: Ended) -> None:
        """What the killed run left."""
        if ended.begun is None:
            trial.phase = "not reached"
            return
        trial.left = len(strays(Folder(self.where)))
        trial.phase = phase(self.where, *ended.begun, trial.plan.world, size_of(self.shapes))
        try:
            found = newest(self.where, self.shapes)
        except Exception as error:
            trial.problem = f"{type(error).__name__}: {error}"
            return
        if found not in (ended.saved, ended.begun):
            trial.problem = f"newest is {found}; saved {ended.saved}, begun {ended.begun}"

    def _run(self, plan: Plan, traced: bool, delay: float | None, victims: list[int]) -> Ended:
        ended = Ended()
        arguments = (self.where, self.shapes, plan, traced)
        with forked(run, plan.world, *arguments) as ranks:
            try:
                watched = plan.victim if plan.line is not None else 0
                while (said := ranks[watched].hear(PATIENCE_S)) is not None:
                    self._hear(watched, plan, traced, ended, [said])
                    if said.get("last") and delay is not None:
                        break
                if delay is not None and ended.begun is not None:
                    time.sleep(delay)
                for victim in victims:
                    ranks[victim].kill()
                killed_at = time.perf_counter()
                for rank, one in enumerate(ranks):
                    self._hear(rank, plan, traced, ended, one.hear_all(PATIENCE_S))
                codes = [one.wait() for one in ranks]
                if victims and len(victims) < plan.world:
                    ended.survivor_s = time.perf_counter() - killed_at
            except TimeoutError as error:
                ended.problem = f"hung: {error}"
                return ended
            for one, code in zip(ranks, codes, strict=True):
                if code > 0:
                    ended.problem = one.log.read_text()[-2000:]
        return ended

    def _hear(
        self, rank: int, plan: Plan, traced: bool, ended: Ended, messages: list[dict[str, Any]]
    ) -> None:
        for said in messages:
            if said.get("last"):
                ended.begun = said["begin"], said["attempt"]
            if "done" not in said:
                continue
            step = said["done"], said["attempt"]
            ended.strays += said["strays"]
            if said["error"] is None:
                ended.saved = max(ended.saved, step)
                self.usual[plan.world, rank, traced] = Usual(said["seconds"], said["lines"])
            if step == ended.begun:
                ended.finished.add(rank)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--megabytes", type=int, default=12, help="size of the state")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shapes = shapes_for(options.megabytes)
    began = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as root,
        report.progress("killed", options.trials) as tick,
    ):
        bench = Bench(f"{root}/checkpoints", shapes, Random(options.seed))
        bench.warm_up()
        while len(bench.trials) < options.trials:
            if bench.trial():
                tick()
        bench.last()
    tell(bench, options, time.perf_counter() - began)
    bad = [trial for trial in bench.trials if trial.problem or trial.next_run]
    raise SystemExit(1 if bad else 0)


def tell(bench: Bench, options: argparse.Namespace, seconds: float) -> None:
    """Print the table and write the file."""
    rows: list[list[Any]] = []
    for name in (*PHASES, "not reached", "all"):
        chosen = [trial for trial in bench.trials if name in ("all", trial.phase)]
        if not chosen and name == "not reached":
            continue
        rows.append(
            [
                name,
                len(chosen),
                sum(trial.by == "time" for trial in chosen),
                sum(trial.killed.startswith("rank") for trial in chosen),
                sum(trial.plan.again for trial in chosen),
                sum(trial.problem is None for trial in chosen),
                sum(trial.left > 0 for trial in chosen),
                sum(trial.next_run is None for trial in chosen),
            ]
        )
    columns = ["killed", "trials", "by time (else by line)", "one rank of two", "step saved again"]
    columns += ["newest state whole", "left something", "next run starts, saves, clean"]
    survivors = [trial.survivor_s for trial in bench.trials if trial.survivor_s is not None]
    report.show(
        f"{len(bench.trials)} kills during saves of {size_of(bench.shapes) / 1e6:.0f} MB (seed "
        f"{options.seed}, {seconds:.0f} s; {bench.missed} came after the save and do not count)",
        columns,
        rows,
    )
    if survivors:
        report.console.print(
            "The other rank of two was told of the failure and ended after "
            f"{report.median(survivors):.2f} s (median; longest {max(survivors):.2f} s)."
        )
    for trial in bench.trials:
        if trial.problem or trial.next_run:
            report.console.print(trial, markup=False)
    report.write(
        "checkpoint_kill",
        {"options": vars(options) | {"json": None}, "columns": columns, "rows": rows}
        | {"missed": bench.missed, "seconds": seconds, "survivor_s": survivors},
        options.json,
    )


if __name__ == "__main__":
    main()
