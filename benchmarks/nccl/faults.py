"""Faults on ranks that share a GPU: is each named, survived, and the end state as undisturbed?

Each layout has a run of its own, with its share of the faults; the runs go on beside each other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from nccl.faulty import KINDS, PLAN
from paceline.checkpoint.diff import diff_checkpoints
from paceline.checkpoint.folder import Folder
from paceline.events import HangFound, RankLost, Restarting, StepDone, read
from paceline.testing.processes import pids, was_started_with

BENCHMARKS = Path(__file__).parents[1]
TAG = "PACELINE_BENCH_RUN"
RANKS = 2
LAYOUTS = ("dp=2,zero=3", "dp=2", "pp=2")
GAP = 4  # steps from fault to fault
_HANGS = ("stop", "loop")
_WORDS = {
    "kill": "SIGKILL",
    "out of memory": "out of memory",
    "raise": "a fault as planned",
    "exit": "exited with code 3",
}


def disturb(count: int, device: str, budget: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each fault with what came of it, and at the end of each layout its run as a whole."""
    faults = [
        {"kind": KINDS[n % len(KINDS)], "rank": (n // len(KINDS) + n) % RANKS} for n in range(count)
    ]
    deadline = time.monotonic() + budget
    held = _gpu_memory() if device == "cuda" else 0
    shares = [faults[n :: len(LAYOUTS)] for n in range(len(LAYOUTS))]
    with (
        tempfile.TemporaryDirectory(prefix="paceline-faults-") as folder,
        ThreadPoolExecutor(len(LAYOUTS)) as runs,
    ):
        for cells in runs.map(
            lambda layout, share: _disturb(Path(folder), layout, share, device, deadline),
            *(LAYOUTS, shares),
        ):
            yield from cells
    more = (_gpu_memory() if device == "cuda" else 0) - held
    words = f"{more / 2**20:.0f} MiB more of the GPU are in use than before"
    outcome = "failed" if more > 2**26 else "ok"
    yield (
        "faults: GPU memory afterwards",
        {"outcome": outcome, "difference": 0.0, "words": words, "seconds": 0.0},
    )


def _disturb(
    folder: Path, layout: str, faults: list[dict[str, Any]], device: str, deadline: float
) -> list[tuple[str, dict[str, Any]]]:
    """A run of one layout without faults and one with them: what came of each fault, and of all."""
    plan = [{**fault, "step": GAP * (n + 1)} for n, fault in enumerate(faults)]
    steps = GAP * (len(plan) + 1)
    place = folder / layout
    place.mkdir()
    base = _train(place / "undisturbed", layout, [], steps, device, deadline)
    cells = [(f"faults, {layout}: none", _cell(base, "ok" if base["status"] == 0 else "failed"))]
    if base["status"] == 0 and plan:
        other = _train(place / "disturbed", layout, plan, steps, device, deadline)
        cells += _judged(layout, plan, other)
        cells += [(f"faults, {layout}: the end state", _end_state(base, other))]
    return cells


def _train(
    folder: Path,
    layout: str,
    plan: list[dict[str, Any]],
    steps: int,
    device: str,
    deadline: float,
) -> dict[str, Any]:
    """Run ``paceline train`` to its end; where it is, and how it ended."""
    folder.mkdir()
    settings = {
        "model": {"target": "nccl.faulty:Net"},
        "data": {"target": "nccl.faulty:Vectors"},
        "loss": {"target": "torch.nn:CrossEntropyLoss"},
        "optimizer": {"name": "nccl.faulty:FaultyAdamW", "lr": 1e-3},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "layout": layout,
        "batch": {"global_batch": 16},
        "train": {"steps": steps, "clip_norm": 1.0},
        "checkpoint": {"every": GAP * 2, "memory_every": 1},
        "launch": {
            "device": device,
            "share_gpu": device == "cuda",
            "max_restarts": len(plan) + 5,
            "backoff": 0.0,
        },
        "hangs": {"after": 6.0},
        "track": {"progress": False},
    }
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    tag = f"{os.getpid()}-{layout}-{folder.name}"
    path = os.pathsep.join(filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, PLAN: json.dumps(plan), TAG: tag, "PYTHONPATH": path}
    run_dir, log = folder / "run", folder / "launcher.log"
    started = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "train", str(config), "--run-dir", str(run_dir)],
            env=environment,
            cwd=BENCHMARKS,
            stdout=output,
            stderr=output,
        )
        try:
            status = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
    time.sleep(1.0)
    return {
        "status": status,
        "seconds": time.monotonic() - started,
        "run": run_dir,
        "said": log.read_text(errors="replace")[-4000:],
        "left": [pid for pid in pids() if was_started_with(pid, TAG, tag)],
    }


def _judged(
    layout: str, plan: list[dict[str, Any]], run: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each fault beside what the run says of it, start by start."""
    starts: list[list[Any]] = [[]]
    for event in read(run["run"]):
        starts[-1].append(event)
        if isinstance(event, Restarting):
            starts.append([])
    for number, fault in enumerate(plan):
        name = f"faults, {layout}: {number + 1}, {fault['kind']} on rank {fault['rank']}"
        events = starts[number] if number < len(starts) else []
        said = [e for e in events if isinstance(e, RankLost | HangFound)]
        lost = next((e for e in said if isinstance(e, RankLost)), None)
        hang = next((e for e in said if isinstance(e, HangFound)), None)
        if fault["kind"] in _HANGS:
            named = hang is not None and list(hang.ranks) == [fault["rank"]]
        else:
            words = _WORDS[fault["kind"]]
            named = lost is not None and lost.rank == fault["rank"] and words in lost.error
        survived = number + 1 < len(starts) and any(
            isinstance(e, StepDone) for e in starts[number + 1]
        )
        words = "; ".join(getattr(e, "summary", "") or getattr(e, "error", "") for e in said)
        seconds = events[-1].time - events[0].time if len(events) > 1 else 0.0
        outcome = "ok" if named and survived else "survived" if survived else "failed"
        yield (
            name,
            {
                "outcome": outcome,
                "difference": 0.0,
                "words": words or run["said"],
                "seconds": seconds,
            },
        )


def _end_state(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    if base["status"] or other["status"]:
        return _cell(other, "failed")
    a, b = (Folder(run["run"] / "checkpoints").checkpoints()[-1] for run in (base, other))
    found = diff_checkpoints(a, b)
    problems = [f"{len(found.tensors)} tensors differ"] if found.tensors else []
    problems += [f"steps {a.step} and {b.step}"] if a.step != b.step else []
    problems += [f"processes {other['left']} are left"] if other["left"] else []
    return {**_cell(other, "failed" if problems else "ok"), "words": "; ".join(problems)}


def _cell(run: dict[str, Any], outcome: str) -> dict[str, Any]:
    return {
        "outcome": outcome,
        "difference": 0.0,
        "words": run["said"],
        "seconds": run["seconds"],
    }


def _gpu_memory() -> int:
    """Bytes in use on the first GPU, by anybody."""
    told = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"],
        capture_output=True,
        text=True,
        check=False,
    )
    return int(told.stdout.strip() or 0) * 2**20 if told.returncode == 0 else 0
