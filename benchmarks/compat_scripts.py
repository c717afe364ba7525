"""Scripts written for other libraries, run through the launcher: do several ranks give the losses
of one process, and of the library itself where it can be had?

    python benchmarks/compat_scripts.py [--only horovod|tensorflow|accelerate|ray] [--json FILE]

Each row of ``SCRIPTS`` is a script, the backend it is for, and the arguments with which it computes
the same on any number of ranks. Losses are what it prints after the word ``loss``. They may differ
by the order of sums: in float32 the seventh digit, which some tens of steps carry into the fifth.
Scripts for Accelerate are run a second time with Accelerate, if it is installed, under torchrun.
Those for Ray Train are a pair: theirs starts a Ray of its own, and ours must give its losses.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
CLOSE = 1e-4
SIZES = (1, 2, 4)


@dataclass(frozen=True)
class Script:
    """One row: what is run, and how on so many ranks."""

    backend: str
    file: str
    arguments: Callable[[int], list[str]]
    options: tuple[str, ...] = ()
    """Further options of ``paceline train``."""
    then: tuple[str, ...] = ()
    """Further arguments of a second run in the same folder, which goes on from the first."""
    theirs: bool = False
    """Whether to run it once more with the library itself, by ``--library``."""


def _split(batch: int, rate: float, flag: str = "--lr") -> Callable[[int], list[str]]:
    """A batch that ranks share, and a rate that the script multiplies by their number."""
    return lambda ranks: ["--batch-size", str(batch // ranks), flag, str(rate / ranks)]


def _no_warmup(ranks: int) -> list[str]:
    return [*_split(16, 0.04, "--base-lr")(ranks), "--warmup-epochs", "0"]


def _killed(ranks: int) -> list[str]:
    return [*_split(32, 0.08)(ranks), *(["--kill", f"{ranks - 1}:2:5"] if ranks > 1 else [])]


SCRIPTS = [
    Script("horovod", "horovod/digits.py", _split(32, 0.08)),
    Script("horovod", "horovod/warmup_resume.py", _no_warmup),
    Script("horovod", "horovod/elastic.py", _split(32, 0.08)),
    Script("horovod", "horovod/elastic.py", _killed, ("--max-restarts", "1")),
    Script("horovod", "horovod/adasum.py", lambda ranks: ["--same-data"]),
    # All ranks see the same batch, and Adasum of equal steps is that step.
    Script("horovod", "horovod/synthetic_benchmark.py", lambda ranks: ["--use-adasum"]),
    # Their batch is the global one already.
    Script("tensorflow", "tensorflow/keras_fit.py", lambda ranks: []),
    Script("tensorflow", "tensorflow/custom_loop.py", lambda ranks: []),
    Script("tensorflow", "tensorflow/callbacks.py", lambda ranks: []),
    Script("accelerate", "accelerate/nlp.py", lambda ranks: [], theirs=True),
    Script("accelerate", "accelerate/cv.py", lambda ranks: [], theirs=True),
    Script(
        *("accelerate", "accelerate/cv.py", lambda ranks: ["--epochs", "4"]),
        then=("--resume-from-checkpoint", "states/epoch_1"),
        theirs=True,
    ),
    Script("accelerate", "accelerate/gan.py", lambda ranks: [], theirs=True),
    Script("accelerate", "accelerate/gan.py", lambda ranks: ["--zero", "2"]),
]


RAY_THEIRS = Script("ray", "coming_from/ray_train/theirs.py", lambda ranks: [])
RAY_OURS = Script("ray", "coming_from/ray_train/ours.py", lambda ranks: [])
RAY_ON_RAY = replace(RAY_OURS, options=("--on", "ray"))


@dataclass(frozen=True)
class Way:
    """One run of a script: on how many ranks, and whether with the library itself."""

    script: Script
    ranks: int
    theirs: bool = False


def comparisons() -> list[list[Way]]:
    """Runs that must give the same losses, each list compared with its first."""
    found = []
    for script in SCRIPTS:
        ways = [Way(script, ranks) for ranks in SIZES]
        if script.theirs and importlib.util.find_spec(script.backend) is not None:
            ways += [Way(script, ranks, theirs=True) for ranks in SIZES]
        found.append(ways)
    ours = [Way(RAY_ON_RAY, 2), Way(RAY_OURS, 1), Way(RAY_OURS, 2)]
    return [*found, [Way(RAY_THEIRS, 2, theirs=True), *ours]]


def command_of(way: Way) -> list[str]:
    """How a script is run on so many ranks."""
    script, ranks = way.script, str(way.ranks)
    file = str(EXAMPLES / script.file)
    if script is RAY_THEIRS:
        return [sys.executable, file]
    arguments = script.arguments(way.ranks)
    if way.theirs:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", ranks, file, "--library", script.backend]
        return [*command, *arguments]
    command = [sys.executable, "-m", "paceline", "train", "--script", file, "--nproc", ranks]
    backend = ["--backend", script.backend] if script.backend in ("horovod", "tensorflow") else []
    return [*command, *backend, *script.options, "--", *arguments]


def run(way: Way) -> tuple[list[float], float]:
    """The losses that a script prints on so many ranks, and the seconds it took."""
    script, ranks = way.script, way.ranks
    command = command_of(way)
    # Beside what a script prints there is the progress of its run, on Ray in the same stream.
    printed = r"(?m)^loss (\d+\.\d+)$" if script.backend == "ray" else r"loss[ =:]+(\d+\.\d+)"
    # A run that goes on begins with one that ends in its middle.
    runs = [["--stop-after", "2"], list(script.then)] if script.then else [[]]
    found: list[float] = []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for more in runs:
            done = subprocess.run(
                [*command, *more],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=600,
            )
            if done.returncode:
                told = f"{done.stdout}{done.stderr}"
                raise SystemExit(f"{script.file} on {ranks} ranks failed:\n{told}")
            found += map(float, re.findall(printed, done.stdout))
    return found, time.monotonic() - begun


def main() -> None:
    """Run the table, print it, and fail if a row does not agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="scripts of this backend")
    parser.add_argument("--json", type=Path, help="write the table there")
    given = parser.parse_args()
    rows = []
    print(f"{'script':66} {'ranks':>5} {'seconds':>7}  {'last loss':>10}  farthest from the first")
    for compared in comparisons():
        backend = compared[0].script.backend
        if given.only not in (None, backend):
            continue
        if backend in ("ray", "tensorflow") and importlib.util.find_spec(backend) is None:
            print(f"{compared[0].script.file:66} not run: {backend} is not installed")
            continue
        expected: list[float] = []
        for way in compared:
            script, ranks = way.script, way.ranks
            losses, seconds = run(way)
            expected = expected or losses
            if len(losses) != len(expected) or not losses:
                raise SystemExit(f"{script.file}: {len(losses)} losses on {ranks} ranks")
            pairs = zip(losses, expected, strict=True)
            farthest = max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)
            by = [f"by {script.backend}"] if way.theirs else []
            name = " ".join([script.file, *script.options, *script.then, *by])
            print(f"{name:66} {ranks:5} {seconds:7.1f}  {losses[-1]:10.6f}  {farthest:.1e}")
            rows.append(
                {"script": name, "ranks": ranks, "seconds": seconds, "losses": losses}
                | {"farthest": farthest, "agrees": farthest < CLOSE}
            )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    if not all(row["agrees"] for row in rows):
        raise SystemExit(f"losses differ by more than {CLOSE:g}")


if __name__ == "__main__":
    main()
