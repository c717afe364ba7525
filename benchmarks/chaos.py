"""A run that cannot be killed: faults on purpose, and whether the run ends where it should have.

Two parts. At a fixed layout, two hosts (network namespaces on this machine) with a rank each train
a small model with dropout and loader workers; ranks, launchers, links, the disk and checkpoints are
disturbed by a schedule that the seed decides, and launchers that end are started again. In the end
every tensor of the last checkpoint and the loss of every step must equal the undisturbed run's, to
the bit. Then a world of four hosts goes to three, to one and back to four in float64: every sample
must have been seen exactly once an epoch, and the losses must be those of a world of four.

    python benchmarks/chaos.py [--faults 100] [--seed 0] [--only KIND]... [--part fixed|elastic]

Needs root, for the hosts.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chaotic import schedule
from chaotic.cluster import Cluster
from chaotic.elastic import rescaled
from chaotic.injecting import Injector, Outcome
from chaotic.judging import Compared, compare
from checkpointing import report

from paceline.testing.hosts import hosts_available

GAP = 12  # steps from fault to fault, about
TAIL = 30  # steps after the last one
_OWN_MOUNTS = "PACELINE_BENCH_OWN_MOUNTS"
_NODE_TIMEOUT_S = 6.0


def main() -> None:
    """See the module."""
    options = _options()
    if reason := hosts_available():
        sys.exit(f"chaos.py needs hosts: {reason}")
    if _OWN_MOUNTS not in os.environ:
        # The small disk that gets filled is a mount: in a table of our own it ends with us.
        os.environ[_OWN_MOUNTS] = "1"
        os.execvp("unshare", ["unshare", "--mount", sys.executable, *sys.argv])
    folder = options.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    clusters: list[Cluster] = []
    content: dict[str, Any] = {"faults": options.faults, "seed": options.seed}
    good = True
    if "fixed" in options.part:
        content["fixed"] = _fixed(options, folder, clusters)
        good &= content["fixed"]["equal"]
    if "elastic" in options.part:
        content["elastic"] = rescaled(folder, clusters)
        good &= content["elastic"]["good"]
    for cluster in clusters:
        cluster.unmount()
    if good and options.keep is None:
        shutil.rmtree(folder)
    content["left_over"] = [line for cluster in clusters for line in cluster.left_over()]
    report.console.print(f"left over: {content['left_over'] or 'nothing'}")
    report.write("chaos", content, options.json)
    sys.exit(0 if good and not content["left_over"] else 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=list(schedule.MEANINGS))
    parser.add_argument("--part", action="append", choices=["fixed", "elastic"])
    parser.add_argument("--nodes", type=int, default=2, choices=[1, 2], help="with 2 ranks in all")
    parser.add_argument(
        "--pause", type=float, default=0.06, help="seconds a step takes more: on a busy machine 0.3"
    )
    parser.add_argument(
        "--keep", type=Path, help="a new folder for the runs, instead of a passing one"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.part = options.part or ["fixed", "elastic"]
    return options


def _settings(steps: int) -> dict[str, Any]:
    return {
        "name": "chaos",
        "model": {"target": "chaotic.work:Net", "args": {"dropout": 0.1}},
        "loss": {"target": "chaotic.work:noted_error"},
        "data": {"target": "chaotic.work:Numbered", "args": {"samples": 1000}, "workers": 1},
        "optimizer": {"name": "chaotic.work:NotingAdamW", "lr": 1e-3},
        "schedule": {"name": "cosine"},
        "batch": {"global_batch": 16},
        "train": {"steps": steps},
        "checkpoint": {"every": 10, "memory_every": 1, "keep": 3},
        "layout": "dp=2",
        "launch": {
            "device": "cpu",
            "max_restarts": 1000,
            "backoff": 0.0,
            "node_timeout": _NODE_TIMEOUT_S,
        },
        "hangs": {"after": 3.0},
        "track": {"progress": False},
    }


def _fixed(options: argparse.Namespace, folder: Path, clusters: list[Cluster]) -> dict[str, Any]:
    """The same layout all the time."""
    kinds = schedule.SINGLE if options.nodes == 1 else schedule.CLUSTER
    faults = schedule.plan(kinds, options.faults, options.seed, GAP, 2, options.only or ())
    settings = _settings(faults[-1].step + TAIL)
    size = {"nodes": options.nodes, "nproc": 2 // options.nodes, "pause": options.pause}
    calm = Cluster(folder / "undisturbed", settings, **size)
    with calm.up():
        calm.wait_done(1200)
    times = [note.time for note in calm.notes.all if note.rank == 0]
    step_s = statistics.median(b - a for a, b in itertools.pairwise(times))
    wild = Cluster(folder / "disturbed", settings, **size)
    clusters += [calm, wild]
    began = time.monotonic()
    outcomes: list[Outcome] = []
    with wild.up(), report.progress("faults", len(faults)) as advance:
        injector = Injector(wild, cut_s=_NODE_TIMEOUT_S * 2, step_s=step_s)
        for fault in faults:
            outcomes.append(injector.happen(fault))
            print(f"{fault.number:4} {outcomes[-1]}", file=sys.stderr, flush=True)
            advance()
        wild.wait_done()
    compared = compare(calm, wild)
    _show(outcomes, compared, time.monotonic() - began)
    return {
        "equal": compared.equal,
        "compared": asdict(compared),
        "step_s": step_s,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


def _show(outcomes: list[Outcome], compared: Compared, seconds: float) -> None:
    kinds = {kind: [o for o in outcomes if o.kind == kind] for kind in schedule.MEANINGS}
    rows = [_row(kind, found) for kind, found in kinds.items() if found]
    report.show(
        f"{len(outcomes)} faults in {compared.steps} steps, {seconds:.0f} s",
        ["", "faults", "new worlds", "steps repeated", "most", "s lost, median", "most", "all"],
        [*rows, _row("all", outcomes)],
    )
    report.console.print(
        f"{compared.tensors} tensors of the last checkpoint: {compared.differing_tensors} differ "
        f"from the undisturbed run's; losses of {compared.steps} steps: "
        f"{compared.differing_losses} differ"
    )


def _row(name: str, outcomes: list[Outcome]) -> tuple[Any, ...]:
    lost = [outcome.lost for outcome in outcomes]
    return (
        schedule.MEANINGS.get(name, name),
        len(outcomes),
        sum(outcome.restarted for outcome in outcomes),
        sum(outcome.repeated for outcome in outcomes),
        max(outcome.repeated for outcome in outcomes),
        f"{statistics.median(lost):.1f}",
        f"{max(lost):.1f}",
        f"{sum(lost):.0f}",
    )


if __name__ == "__main__":
    main()
