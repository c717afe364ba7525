"""A world that goes from four hosts to three, to one and back, beside one that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpointing import report

from chaotic.cluster import Cluster
from chaotic.judging import compare, sample_problems

NODES = 4
SAMPLES = 500
GLOBAL_BATCH = 12
EPOCHS = 6
STEPS_PER_EPOCH = -(-SAMPLES // GLOBAL_BATCH)
# After which steps the world changes, and to how many hosts.
CHANGES = {30: 3, 60: 1, 80: 4}
PAUSE_S = 0.5  # a world of one must not be done before the others are back
LARGEST_DIFFERENCE = 1e-9


def _settings() -> dict[str, Any]:
    return {
        "name": "elastic",
        "model": {"target": "chaotic.work:Net", "args": {"dropout": 0.0}},
        "loss": {"target": "chaotic.work:noted_error"},
        "data": {
            "target": "chaotic.work:Numbered",
            "args": {"samples": SAMPLES, "double": True},
        },
        "optimizer": {"name": "chaotic.work:NotingAdamW", "lr": 1e-3},
        "schedule": {"name": "constant"},
        "batch": {"global_batch": GLOBAL_BATCH},
        "train": {"epochs": EPOCHS},
        "checkpoint": {"every": 10, "memory_every": 1},
        "precision": "fp64",
        "launch": {
            "device": "cpu",
            "max_restarts": 1000,
            "backoff": 0.0,
            "node_timeout": 6.0,
            "standby": False,
        },
        "track": {"progress": False},
    }


def rescaled(folder: Path, clusters: list[Cluster]) -> dict[str, Any]:
    """Run both, print how they compare."""
    size = {"nodes": NODES, "nproc": 1, "pause": PAUSE_S}
    calm = Cluster(folder / "four", _settings(), **size)
    with calm.up():
        calm.wait_done(1200)
    changing = Cluster(folder / "rescaled", _settings(), nnodes=f"1:{NODES}", **size)
    clusters += [calm, changing]
    with changing.up():
        # All four come first: a run that begins before is one more change.
        for step, hosts in {0: NODES, **CHANGES}.items():
            changing.wait(f"step {step}", lambda step=step: changing.notes.step >= step, 300)
            _resize(changing, hosts)
            changing.wait(
                f"world of {hosts}",
                lambda hosts=hosts, step=step: (
                    _size(changing) == hosts and changing.notes.step > step
                ),
                300,
            )
        changing.wait_done(600)
    sizes = _sizes(changing)
    problems = sample_problems(changing, SAMPLES, EPOCHS)
    compared = compare(calm, changing)
    worst = compared.largest_loss_difference
    report.console.print(
        f"worlds of {', '.join(map(str, sizes))} hosts; {EPOCHS} epochs of {SAMPLES} samples: "
        f"{'; '.join(problems) or 'each sample exactly once an epoch'}; losses of "
        f"{compared.steps} steps differ by {worst:.1e} at most from those of {NODES} hosts"
    )
    whole = compared.steps == EPOCHS * STEPS_PER_EPOCH
    wanted = [NODES, *CHANGES.values()]
    return {
        "good": whole
        and not problems
        and worst <= LARGEST_DIFFERENCE
        and [size for size in sizes if size in wanted] == wanted,
        "sizes": sizes,
        "sample_problems": problems,
        "largest_loss_difference": worst,
    }


def _resize(cluster: Cluster, hosts: int) -> None:
    """Kill the launchers of the last hosts, or start those that are missing."""
    for number, launcher in enumerate(cluster.launchers):
        launcher.wanted = number < hosts
        if not launcher.wanted and launcher.process is not None:
            launcher.process.kill()


def _size(cluster: Cluster) -> int:
    ranks = cluster.notes.ranks()
    return next(iter(ranks.values())).size if ranks else 0


def _sizes(cluster: Cluster) -> list[int]:
    """The sizes of the worlds that trained, one after the other."""
    found: list[int] = []
    for note in cluster.notes.all:
        if not found or found[-1] != note.size:
            found.append(note.size)
    return found
