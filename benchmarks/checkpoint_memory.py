"""What a snapshot of the state in shared memory costs, as often as at every step.

Two ranks train the demo's GPT. One engine takes turns of ten steps: without snapshots, with one in
each turn (k=10), with one at every step (k=1), and with one at every step that is also copied to a
partner's memory (as on two nodes: each rank has a memory folder of its own). The table gives the
median ratio to the turn without. Then the state is restored from each rung of the ladder.

    python benchmarks/checkpoint_memory.py [--rounds 12]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import shutil
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpointing import report

import paceline
from paceline.checkpoint.checkpoints import Checkpoints
from paceline.checkpoint.memory.find import OWN_MEMORY, PARTNER_MEMORY, snapshots_in_memory
from paceline.checkpoint.memory.snapshots import MemorySnapshots
from paceline.checkpoint.rank_state import RankState
from paceline.config import demo
from paceline.engine.internals import internals_of
from paceline.models import GPT, token_cross_entropy
from paceline.testing import RankPool

STEPS = 10
OFF, TEN, ONE, COPIED = "off", "k=10", "k=1", "k=1, copied to a partner"
RESTORES = 5


class Bench:
    """The demo's model on this rank, its checkpoints, and a memory tier as on two nodes."""

    def __init__(self, root: str) -> None:
        self.world = paceline.World.current()
        torch.manual_seed(0)
        model = GPT(**demo.MODEL_ARGS)
        self.engine = paceline.Engine(
            model,
            loss=token_cross_entropy,
            optimizer=torch.optim.AdamW(model.parameters(), lr=demo.LR),
            clip_norm=demo.CLIP_NORM,
        )
        draw = torch.Generator().manual_seed(self.world.rank)
        shape = (demo.GLOBAL_BATCH // self.world.size, demo.MODEL_ARGS["context"] + 1)
        tokens = torch.randint(0, demo.MODEL_ARGS["vocab_size"], shape, generator=draw)
        self.batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        self.where = f"{root}/checkpoints"
        self.node = Path(root) / f"node-{self.world.rank}"
        self.events: list[Any] = []
        self.group = self.world.background_group("partner")

    def open(self) -> None:
        """As a run does when it starts."""
        self.checkpoints = Checkpoints(
            self.where,
            self.engine,
            options=paceline.Checkpointing(memory_every=1, keep=10),
            report=self.events.append,
        )

    def open_partners(self) -> None:
        """A memory tier whose ranks do not share memory."""
        self.node.mkdir(exist_ok=True)
        self.partners = MemorySnapshots(self.where, self.group, after=None, root=self.node)
        assert self.partners.partner is not None

    def state(self) -> RankState:
        """What the engine saves; and each rank's random state, as a run has it."""
        state = internals_of(self.engine).rank_state.collect()
        state.objects[f"random/{self.world.rank}"] = paceline.world.rng_state()
        return state

    def copied(self) -> None:
        """A snapshot that goes to the partner, too."""
        self.engine.settle()
        self.partners.snapshot(self.engine.steps_done, self.state())

    def turn(self, every: int | None, snapshot: Callable[[], Any]) -> float:
        """Ten steps; the seconds they took."""
        paceline.collectives.barrier()
        time.sleep(0.05)  # the last turn's snapshot may still be on its way
        began = time.perf_counter()
        for step in range(1, STEPS + 1):
            _ = self.engine.step(self.batch).loss
            if every is not None and step % every == 0:
                snapshot()
        paceline.collectives.barrier()
        return time.perf_counter() - began


def training(root: str, rounds: int) -> dict[str, list[float]]:
    """On each rank: the seconds of every turn."""
    bench = Bench(root)
    bench.open()
    bench.open_partners()
    kinds: dict[str, tuple[int | None, Callable[[], Any]]] = {
        OFF: (None, lambda: None),
        TEN: (STEPS, bench.checkpoints.snapshot),
        ONE: (1, bench.checkpoints.snapshot),
        COPIED: (1, bench.copied),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds + 1):
        order = list(kinds) if number % 2 else list(reversed(kinds))
        for name in order:
            seconds[name].append(bench.turn(*kinds[name]))
    bench.partners.free()
    bench.checkpoints.close()
    return {name: values[1:] for name, values in seconds.items()}


def restoring(root: str) -> dict[str, list[float]]:
    """On each rank: the seconds that each rung took."""
    bench = Bench(root)
    seconds: dict[str, list[float]] = defaultdict(list)
    warnings.simplefilter("ignore")  # that a damaged checkpoint is stepped over is what we want
    bench.open()
    for _ in range(2):
        bench.turn(None, lambda: None)
        bench.checkpoints.save(wait=True)
    bench.checkpoints.close()
    for _ in range(RESTORES):
        _restore(bench, seconds, "newest checkpoint", "checkpoint")
    _own_memory(bench, seconds)
    _partner_memory(bench, seconds)
    paceline.collectives.barrier()
    if bench.world.is_main:
        newest = sorted(Path(bench.where).glob("step-*/rank-00000-*.bin"))[-1]
        content = bytearray(newest.read_bytes())
        content[-1] ^= 1
        newest.write_bytes(content)
    paceline.collectives.barrier()
    for _ in range(RESTORES):
        _restore(bench, seconds, "the one before, the newest being damaged", "checkpoint")
    return dict(seconds)


def _restore(bench: Bench, seconds: dict[str, list[float]], name: str, rung: str) -> None:
    """Start anew and restore; the time of all rungs tried, the last of which must be ``rung``."""
    bench.open()
    bench.events.clear()
    paceline.collectives.barrier()
    began = time.perf_counter()
    assert bench.checkpoints.restore() is not None
    paceline.collectives.barrier()
    seconds[name].append(time.perf_counter() - began)
    assert (bench.events[-1].rung, bench.events[-1].ok) == (rung, True), bench.events
    bench.checkpoints.close(clean=False)


def _own_memory(bench: Bench, seconds: dict[str, list[float]]) -> None:
    bench.open()
    bench.turn(STEPS, bench.checkpoints.snapshot)
    bench.checkpoints.close(clean=False)
    for _ in range(RESTORES):
        _restore(bench, seconds, "own node's memory", OWN_MEMORY)
    bench.open()
    bench.checkpoints.restore()
    bench.checkpoints.snapshot()  # makes the tier, so that close() frees its memory
    bench.checkpoints.close()


def _partner_memory(bench: Bench, seconds: dict[str, list[float]]) -> None:
    """One of the two nodes was replaced by an empty one."""
    bench.open_partners()
    bench.turn(STEPS, bench.copied)
    bench.partners.close()
    if bench.world.rank == 1:
        shutil.rmtree(bench.node)
        bench.node.mkdir()
    for _ in range(RESTORES):
        paceline.collectives.barrier()
        began = time.perf_counter()
        held = snapshots_in_memory(bench.where, bench.group, root=bench.node)
        checkpoint = held[0].open()
        internals_of(bench.engine).rank_state.take(checkpoint, checkpoint.load)
        paceline.collectives.barrier()
        seconds["partner's memory"].append(time.perf_counter() - began)
        checkpoint.close()
        assert checkpoint.rung == PARTNER_MEMORY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help="turns of each kind")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with RankPool() as pool:
        with tempfile.TemporaryDirectory(dir=shared) as root:
            steps = pool.run(training, root, options.rounds, world_size=2, timeout=600)[0]
        with tempfile.TemporaryDirectory(dir=shared) as root:
            rungs = pool.run(restoring, root, world_size=2, timeout=600)[0]
    rows = []
    for name, values in steps.items():
        ratio = report.median_ratio(values, steps[OFF])
        rows.append([name, f"{1000 * report.median(values) / STEPS:.2f}", f"{ratio:.3f}"])
    report.show(
        f"snapshots in memory, demo GPT on two ranks, {options.rounds} turns of {STEPS} steps, "
        f"load average {report.load_average()}",
        ["a snapshot every k steps", "ms/step (median)", "ratio to off (median)"],
        rows,
    )
    report.show(
        f"restored from, {RESTORES} times each",
        ["rung", "ms (median)"],
        [[name, f"{1000 * report.median(values):.1f}"] for name, values in rungs.items()],
    )
    content = {"options": vars(options) | {"json": None}, "turns": steps, "restores": rungs}
    content["ratios"] = {n: report.median_ratio(v, steps[OFF]) for n, v in steps.items()}
    report.write("checkpoint_memory", content, options.json)


if __name__ == "__main__":
    main()
