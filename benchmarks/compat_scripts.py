"""Scripts written for other libraries, run through the launcher: do several ranks give the losses
of one process?

    python benchmarks/compat_scripts.py [--only horovod] [--json FILE]

Each row of ``SCRIPTS`` is a script, the backend it is for, and the arguments with which it computes
the same on any number of ranks. Losses are what it prints after the word ``loss``. They may differ
by the order of sums: in float32 the seventh digit, which some tens of steps carry into the fifth.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
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
]


def run(script: Script, ranks: int) -> tuple[list[float], float]:
    """The losses that a script prints on so many ranks, and the seconds it took."""
    command = [sys.executable, "-m", "paceline", "train", "--backend", script.backend]
    command += ["--script", str(EXAMPLES / script.file), "--nproc", str(ranks), *script.options]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "--", *script.arguments(ranks)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
    if done.returncode:
        raise SystemExit(f"{script.file} on {ranks} ranks failed:\n{done.stdout}{done.stderr}")
    found = [float(value) for value in re.findall(r"loss[ =:]+(\d+\.\d+)", done.stdout)]
    return found, time.monotonic() - begun


def main() -> None:
    """Run the table, print it, and fail if a row does not agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="scripts of this backend")
    parser.add_argument("--json", type=Path, help="write the table there")
    given = parser.parse_args()
    rows = []
    print(f"{'script':44} {'ranks':>5} {'seconds':>7}  {'last loss':>10}  farthest from one rank")
    for script in SCRIPTS:
        if given.only not in (None, script.backend):
            continue
        expected: list[float] = []
        for ranks in SIZES:
            losses, seconds = run(script, ranks)
            expected = expected or losses
            if len(losses) != len(expected) or not losses:
                raise SystemExit(f"{script.file}: {len(losses)} losses on {ranks} ranks")
            pairs = zip(losses, expected, strict=True)
            farthest = max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)
            name = " ".join([script.file, *script.options])
            print(f"{name:44} {ranks:5} {seconds:7.1f}  {losses[-1]:10.6f}  {farthest:.1e}")
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
