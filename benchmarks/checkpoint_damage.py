"""Does a damaged checkpoint load? A thousand random damages, beside torch's own ways to save.

A small GPT's parameters and Adam's moments are saved by 2, 3 and 4 ranks, two steps each, by
Paceline, by torch.distributed.checkpoint and by torch.save. Then the newer save is damaged, again
and again: files flipped, cut, swapped, missing, … Paceline must find each damage, refuse to load
the damaged checkpoint, and go on from the step before, bitwise-identical. Of the other two we count
how many of the same damages load without an error, and give wrong values.

    python benchmarks/checkpoint_damage.py [--damages 1000] [--seed 0] [--only Paceline]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import argparse
import math
import resource
import shutil
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from checkpointing import report
from checkpointing.damages import KINDS, Done
from checkpointing.forks import Here, forked, results
from checkpointing.rivals import Distributed, Paceline, Saves, TorchSave
from checkpointing.states import Shapes, differing, gpt_shapes, size_of, whole_tensors

from paceline.checkpoint.folder import Folder
from paceline.checkpoint.restore_order import RestoreCandidate, restore_newest
from paceline.errors import CheckpointError

WORLDS = (2, 3, 4)
STEP = 2
"""The step that is damaged; the one before is left alone."""
ATTEMPT = 100
"""Added to the seed of a save of the same step that was replaced by another one."""
LIMIT_S, LIMIT_BYTES = 20, 8 * 2**30
"""What a load may take: a flipped length must not take the machine down."""

Outcome = str
DETECTED, SILENT, UNHARMED = "detected", "silent", "unharmed"


class Bench:
    """The saves of one way to save, by each number of ranks, whole and to be damaged."""

    def __init__(self, way: Saves, root: Path, shapes: Shapes) -> None:
        self.way, self.root, self.shapes = way, root, shapes
        self.expected = {step: whole_tensors(shapes, step) for step in (STEP - 1, STEP)}
        self._into = whole_tensors(shapes, 0)
        for world in WORLDS:
            results(self._save, world, world)
            shutil.copytree(self._kept(world), self.work(world))
            for step in self.expected:
                assert not self.wrong(world, step)

    def work(self, world: int) -> Path:
        return self.root / f"{world}"

    def _kept(self, world: int) -> Path:
        return self.root / f"{world}-kept"

    def _save(self, here: Here, world: int) -> None:
        kept = self._kept(world)
        saves = [(STEP - 1, STEP - 1), (STEP, STEP + ATTEMPT), (STEP, STEP)]
        for step, seed in saves:
            self.way.save(here, kept, step, whole_tensors(self.shapes, seed))
            if (group := here.group()) is not None:
                group.barrier().wait()
            if here.rank == 0 and self.way.manifest is not None:
                made = self.way.folder(kept, step) / self.way.manifest
                shutil.copyfile(made, self.root / f"{world}-stale-{seed}")

    def damage(self, world: int, kind: str, seed: int) -> Done | None:
        """Mend what is there, then damage it; what was done to which file."""
        folder = self.way.folder(self.work(world), STEP)
        shutil.rmtree(folder)
        shutil.copytree(self.way.folder(self._kept(world), STEP), folder)
        stale = tuple(self.root / f"{world}-stale-{s}" for s in (STEP - 1, STEP + ATTEMPT))
        return KINDS[kind](self.way.site(self.work(world), STEP, stale), Random(seed))

    def wrong(self, world: int, step: int) -> list[str]:
        """Load it: the tensors that are not as they were saved."""
        for tensor in self._into.values():
            tensor.fill_(math.nan)
        found = self.way.load(self.work(world), step, self._into)
        return differing(found, self.expected[step])

    def outcome(self, world: int) -> Outcome:
        """What loading it gives."""
        try:
            wrong = self.wrong(world, STEP)
        except Exception:
            return DETECTED
        return SILENT if wrong else UNHARMED


def stepped_over(bench: Bench, world: int, files: list[str]) -> str | None:
    """Resume as a run does: ``None`` if the damage was told and the step before it was used.

    ``files`` were damaged: one of them must be named.
    """
    folder = Folder(bench.work(world))
    told: dict[int | None, str] = {}
    rungs = [
        RestoreCandidate("checkpoint", one.step, partial(_restored, bench, world, one.step))
        for one in reversed(folder.checkpoints())
    ]
    try:
        found = restore_newest(rungs, lambda tried: told.update({tried.step: tried.detail}))
    except CheckpointError as error:
        return f"raised: {error}"
    if folder.get(STEP).name not in folder.unfinished():
        if not told.get(STEP):
            return "the damage was not told"
        if not any(file in told[STEP] for file in files):
            return f"{files} not named: {told[STEP]}"
    if found is None or found[0] != STEP - 1:
        return f"{found} was taken"
    return f"{found[1]} differ in the step before" if found[1] else None


def _restored(bench: Bench, world: int, step: int) -> tuple[int, list[str]]:
    return step, bench.wrong(world, step)


Job = tuple[int, str, int]
"""Number of ranks, kind, seed."""


def rival(bench: Bench, jobs: list[Job], tick: Any) -> Counter[tuple[str, Outcome]]:
    """What the damages do to another way to save; in processes that may crash."""
    counted: Counter[tuple[str, Outcome]] = Counter()

    def work(here: Here, rest: list[Job]) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
        for world, kind, seed in rest:
            done = bench.damage(world, kind, seed)
            here.say(outcome=None if done is None else bench.outcome(world))

    rest = list(jobs)
    while rest:
        with forked(work, 1, rest) as [worker]:
            while rest:
                try:
                    said = worker.hear(LIMIT_S)
                except TimeoutError:
                    said = None
                tick()
                kind = rest.pop(0)[1]
                if said is None:  # it crashed, or would have gone on for ever: noticed, at least
                    counted[kind, DETECTED] += 1
                    break
                if said["outcome"] is not None:
                    counted[kind, said["outcome"]] += 1
    return counted


def own(bench: Bench, jobs: list[Job], tick: Any) -> tuple[Counter[tuple[str, str]], list[str]]:
    """What the damages do to Paceline's checkpoints; and each one that was not handled."""
    counted: Counter[tuple[str, str]] = Counter()
    problems = []
    for world, kind, seed in jobs:
        done = bench.damage(world, kind, seed)
        assert done is not None
        outcome = bench.outcome(world)
        problem = stepped_over(bench, world, done.files)
        counted[kind, outcome] += 1
        counted[kind, "previous"] += problem is None
        if outcome != DETECTED or problem is not None:
            what = f"{world} ranks, {kind} ({done.files} {done.what}), seed {seed}"
            problems.append(f"{what}: {outcome}; {problem}")
        tick()
    return counted, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--damages", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--only", help="one way to save: Paceline, torch.save, …")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    draw = Random(options.seed)
    kinds = list(KINDS)
    jobs = [
        (draw.choice(WORLDS), kinds[number % len(kinds)], draw.getrandbits(32))
        for number in range(options.damages)
    ]
    shapes = gpt_shapes(options.layers, options.width)
    began = time.perf_counter()
    ways: list[Saves] = [Paceline(), Distributed(), TorchSave()]
    counts: dict[str, Counter[tuple[str, str]]] = {}
    problems: list[str] = []
    for way in ways:
        if options.only not in (None, way.name):
            continue
        with tempfile.TemporaryDirectory() as root, report.progress(way.name, len(jobs)) as tick:
            bench = Bench(way, Path(root) / "saves", shapes)
            if isinstance(way, Paceline):
                counts[way.name], problems = own(bench, jobs, tick)
            else:
                counts[way.name] = rival(bench, jobs, tick)
    tell(options, counts, problems, size_of(shapes), time.perf_counter() - began)
    raise SystemExit(1 if problems else 0)


def tell(
    options: argparse.Namespace,
    counts: dict[str, Counter[tuple[str, str]]],
    problems: list[str],
    size: int,
    seconds: float,
) -> None:
    """Print the table and write the file."""
    title = (
        f"{options.damages} damages to a state of {size / 2**20:.1f} MiB saved by 2, 3 and 4 ranks "
        f"(seed {options.seed}, {seconds:.0f} s)"
    )
    tables = {}
    for name, counted in counts.items():
        own_table = name == "Paceline"
        last = "step before used" if own_table else "loaded, unharmed"
        columns = [
            "damage",
            "done",
            "refused",
            "loaded" if own_table else "loaded, wrong values",
            last,
        ]
        rows: list[list[Any]] = []
        for kind in KINDS:
            refused, wrong, unharmed = (counted[kind, o] for o in (DETECTED, SILENT, UNHARMED))
            done = refused + wrong + unharmed
            if own_table:  # that it would have been unharmed is no reason to load it
                rows.append([kind, done, refused, wrong + unharmed, counted[kind, "previous"]])
            else:
                rows.append([kind, done, refused, wrong, unharmed])
        rows.append(["all", *(sum(column) for column in list(zip(*rows, strict=True))[1:])])
        report.show(f"{name}: {title}", columns, rows)
        tables[name] = {"columns": columns, "rows": rows}
    for problem in problems[:20]:
        report.console.print(problem, markup=False)
    report.write(
        "checkpoint_damage",
        {"options": vars(options) | {"json": None}, "problems": problems, "tables": tables}
        | {"state_bytes": size, "seconds": seconds},
        options.json,
    )


if __name__ == "__main__":
    main()
