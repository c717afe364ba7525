"""Layouts over real NCCL, several ranks on one GPU: every row of docs/parity.md, features, faults.

    python benchmarks/nccl_matrix.py layouts [--columns GPT] [--rows 'tp=2*'] [--precision bf16]
    python benchmarks/nccl_matrix.py features
    python benchmarks/nccl_matrix.py faults [--faults 20]
    python benchmarks/nccl_matrix.py worlds             # that shrink and grow
    python benchmarks/nccl_matrix.py table [--write docs/parity.md]    # what is there, as tables

NCCL refuses two ranks of one host on one device; ``share_gpu`` lets each pass for a host of its
own: slow, over sockets, but with NCCL's own streams, order and errors. Results are kept in
benchmarks/results/nccl_matrix.json (or --out), so that a run that was stopped goes on from there;
a case that hangs is ended after --limit seconds, with the stack of every rank, and the rest goes
on. After --budget seconds no further case begins. ``--device cpu`` tries the same on CPU ranks over
Gloo. The exit status is 1 if anything differs, hangs or crashes.

``--mps`` starts NVIDIA's MPS for the time of the run, where it is installed: the kernels of all
ranks then run beside each other, instead of in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nccl import faults, features, rescaling
from nccl.proving import ProverInOneWorld
from nccl.worlds import Task, run_all
from parity.columns import COLUMNS, SPECIAL, subject
from parity.page import HEADING, write_nccl_part
from parity.rows import GLOBAL_BATCH, Row, all_rows

from paceline.config.devices import count_gpus
from paceline.errors import RankFailed
from paceline.options import DataOptions
from paceline.prove.cases import parse_cases
from paceline.prove.devices import ProofDevice
from paceline.prove.prover import PRELOAD
from paceline.prove.subject import Subject, given
from paceline.testing import RankPool

RESULTS = Path(__file__).parent / "results" / "nccl_matrix.json"
LOADED = [*PRELOAD, "paceline.models.gpt"]
Results = dict[str, dict[str, Any]]


def main() -> int:
    """Do what was asked for, and keep what was found."""
    options = _options()
    gpus = count_gpus()
    if options.device == "cuda" and not gpus:
        sys.exit("no GPU here: give --device cpu, to try the same over Gloo.")
    results: Results = {}
    if options.out.exists() and not options.fresh:
        results = json.loads(options.out.read_text())
    run = Run(options, gpus, results)
    with _mps() if options.mps else contextlib.nullcontext():
        parts = {"layouts": run.layouts, "features": run.features}
        parts.update(faults=run.faults, worlds=run.worlds, table=lambda: None)
        parts[options.part]()
    print(page := document(results))
    if options.write:
        write_nccl_part(options.write, page)
    return int(any(cell["outcome"] not in ("same", "refused", "ok") for cell in results.values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=("layouts", "features", "faults", "worlds", "table"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", default="*", help="pattern on titles, like 'tp=2*'")
    parser.add_argument(
        "--columns", default="GPT", help="models of docs/parity.md and harder ones, by name"
    )
    parser.add_argument("--precision", default="fp64", help="of the layouts")
    parser.add_argument("--compile", action="store_true", help="compile the layouts' models")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps to compare")
    parser.add_argument("--faults", type=int, default=20, help="how many faults")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one case")
    parser.add_argument("--budget", type=float, default=520.0, help="seconds for all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are kept")
    parser.add_argument("--fresh", action="store_true", help="forget the results that are there")
    parser.add_argument("--write", type=Path, help="write the tables into this page")
    parser.add_argument("--mps", action="store_true", help="start NVIDIA's MPS")
    options = parser.parse_args()
    if unknown := set(options.columns.split(",")) - {*COLUMNS, *SPECIAL}:
        known = ", ".join([*COLUMNS, *SPECIAL])
        parser.error(f"--columns {', '.join(sorted(unknown))}: not among {known}")
    return options


class Run:
    """One command: its options, and the results so far."""

    def __init__(self, options: argparse.Namespace, gpus: int, results: Results) -> None:
        self.options, self.gpus, self.results = options, gpus, results
        self.deadline = time.monotonic() + options.budget

    @property
    def limits(self) -> dict[str, Any]:
        """For ``run_all``."""
        device, limit = self.options.device, self.options.limit
        return {"device": device, "gpus": self.gpus, "limit": limit, "deadline": self.deadline}

    def keep(self, name: str, **cell: Any) -> None:
        """Write a result down, and show it."""
        self.results[name] = cell
        self.options.out.parent.mkdir(parents=True, exist_ok=True)
        self.options.out.write_text(json.dumps(self.results, indent=1))
        found = f" {cell['difference']:.0e}" if cell["outcome"] in ("same", "differs") else ""
        print(f"{cell['outcome']:8} {name}:{found} ({cell['seconds']:.1f} s)", flush=True)
        if cell["outcome"] not in ("same", "refused", "ok"):
            print(cell["words"], flush=True)

    # ------------------------------------------------------------------ layouts

    def layouts(self) -> None:
        """The rows of docs/parity.md: the same proof, on the GPU."""
        with RankPool(timeout=self.options.limit, preload=LOADED) as pool:
            for column in self.options.columns.split(","):
                rows = [row for row in all_rows() if fnmatch.fnmatch(str(row), self.options.rows)]
                rows = [row for row in rows if self._title(row, column) not in self.results]
                for blocks in sorted({row.blocks for row in rows}):
                    if time.monotonic() < self.deadline:
                        chosen = [row for row in rows if row.blocks == blocks]
                        self._prove(column, blocks, chosen, pool)

    def _title(self, row: Row, column: str) -> str:
        more = [] if self.options.precision == "fp64" else [self.options.precision]
        more += ["compiled"] if self.options.compile else []
        return " | ".join([str(row), column, *more])

    def _prove(self, column: str, blocks: int, rows: list[Row], pool: RankPool) -> None:
        options = self.options
        cases = parse_cases([row.case for row in rows], microbatch=None, global_batch=GLOBAL_BATCH)
        taken = dict(subject(column, blocks))
        engine = {"clip_norm": 0.1, "compile": options.compile}
        engine["sync_batchnorm"] = bool(taken.get("sync_batchnorm"))
        payload = given(
            taken["model"],
            taken["optimizer"],
            taken.get("loss"),
            taken["data"],
            DataOptions(),
            engine,
        )
        prover = ProverInOneWorld(
            Subject(payload, GLOBAL_BATCH, 0, options.steps, options.precision),
            clip_norm=0.1,
            sync_batchnorm=engine["sync_batchnorm"],
            plant=None,
            timeout=options.limit,
            tell=lambda text: None,
            pool=pool,
            place=ProofDevice(options.device, self.gpus),
        )
        prover.limits = self.limits
        prover.told = lambda name, seconds: print(f"  ran {name} in {seconds:.1f} s", flush=True)
        prover.all_cases = cases
        for row, found in zip(rows, prover.prove(cases).rows, strict=True):
            if found.outcome != "not run":
                self.keep(
                    self._title(row, column),
                    outcome=found.outcome,
                    difference=found.difference,
                    words=found.words,
                    seconds=found.seconds,
                )

    # ------------------------------------------------------------------ features

    def features(self) -> None:
        """What the rows do not have."""
        wanted = {str(feature): feature for feature in features.FEATURES}
        wanted = {
            name: feature
            for name, feature in wanted.items()
            if fnmatch.fnmatch(name, self.options.rows) and name not in self.results
        }
        with RankPool(timeout=self.options.limit, preload=LOADED) as pool:
            expected = self._expected(wanted, pool)

            def done(name: str, found: list[Any] | RankFailed, seconds: float) -> None:
                self._judge(name, wanted[name], found, expected.get(name), seconds)

            tasks = {n: Task(f.ranks, features.train, (f,)) for n, f in wanted.items()}
            with tempfile.TemporaryDirectory(prefix="paceline-nccl-") as files:
                run_all(tasks, pool, Path(files), done=done, **self.limits)

    def _expected(
        self, wanted: dict[str, features.Feature], pool: RankPool
    ) -> dict[str, list[float]]:
        """On the CPU: what one process computes, or the same layout over Gloo.

        A model that comes without weights draws them where it is trained: its reference does too.
        """
        found: dict[str, list[float]] = {}

        def done(name: str, results: list[Any] | RankFailed, seconds: float) -> None:
            if isinstance(results, RankFailed):
                print(f"  {name}: fails on the CPU: {results}", flush=True)
            else:
                found[name] = results[0]

        tasks = {
            name: Task(feature.ranks, features.train, (feature,))
            if feature.lossy
            else Task(1, features.train, (feature, "dp=1"))
            for name, feature in wanted.items()
        }
        for device in dict.fromkeys(("cpu", self.options.device)):
            chosen = {
                name: task
                for name, task in tasks.items()
                if device == ("cpu" if wanted[name].model != "meta" else self.options.device)
            }
            with tempfile.TemporaryDirectory(prefix="paceline-nccl-") as files:
                run_all(chosen, pool, Path(files), done=done, **{**self.limits, "device": device})
        return found

    def _judge(
        self,
        name: str,
        feature: features.Feature,
        found: list[Any] | RankFailed,
        expected: list[float] | None,
        seconds: float,
    ) -> None:
        if isinstance(found, RankFailed) or expected is None:
            words = str(found) if isinstance(found, RankFailed) else "it has nothing to be beside"
            self.keep(name, outcome="failed", difference=0.0, words=words, seconds=seconds)
            return
        worst = features.difference(found, expected)
        same = worst <= feature.tolerance
        self.keep(
            name,
            outcome="same" if same else "differs",
            difference=worst,
            words="" if same else f"bound {feature.tolerance:.0e}: {found[0]} beside {expected}",
            seconds=seconds,
        )

    # ------------------------------------------------------------------ faults

    def faults(self) -> None:
        """A run that is disturbed, beside one that is not."""
        for name, cell in faults.disturb(
            self.options.faults, self.options.device, self.options.budget
        ):
            self.keep(name, **cell)

    def worlds(self) -> None:
        """A world that loses a machine and gets it back."""
        for name, cell in rescaling.rescale(self.options.device, self.options.budget):
            self.keep(name, **cell)


@contextlib.contextmanager
def _mps() -> Iterator[None]:
    """NVIDIA's multi-process service, in folders of our own."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        print("--mps: nvidia-cuda-mps-control is not installed here; going on without", flush=True)
        yield
        return
    with tempfile.TemporaryDirectory(prefix="paceline-mps-") as folder:
        os.environ.update(CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder)
        subprocess.run([control, "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run([control], input=b"quit\n", check=False)
            for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
                del os.environ[name]


def document(results: Results) -> str:
    """Everything found, as a part of docs/parity.md."""
    faults = {name: cell for name, cell in results.items() if name.startswith("faults")}
    proofs = {n: c for n, c in results.items() if " | " in n}
    rest = {n: c for n, c in results.items() if n not in proofs and n not in faults}
    good = sum(cell["outcome"] in GOOD for cell in results.values())
    refused = sum(cell["outcome"] == "refused" for cell in results.values())
    lines = [
        HEADING,
        "",
        "The same on ranks that share one GPU, over real NCCL (`benchmarks/nccl_matrix.py`; "
        "[how that works](guides/gpus.md#ranks-that-share-a-gpu)). Two AdamW steps in float64, "
        "unless a row says otherwise; the bound is that of the CPU or, in a lower precision, what "
        "one process shows against itself. "
        f"{good} of {len(results) - refused} right, {refused} refused.",
    ]
    if proofs:
        lines += ["", "| layout | model | largest difference |", "|---|---|---|"]
        for name, cell in proofs.items():
            layout, _, model = name.partition(" | ")
            lines.append(f"| `{layout}` | {model.replace(' | ', ', ')} | {_told(cell)} |")
    if rest:
        lines += [
            *("", "Options and models that the rows above do not have, four steps each; what"),
            "loses something on the wire is beside the same on CPU ranks, else beside one process:",
            *("", "| | largest difference |", "|---|---|"),
            *(f"| `{name}` | {_told(cell)} |" for name, cell in rest.items()),
        ]
    if faults:
        lines += [
            "",
            "Faults in runs that go on after them. `ok`: rank and cause were named, and the run "
            "went on; in the end, that every tensor of the last checkpoint is that of a run "
            "without faults, to the bit, and no process is left. **survived**: named wrongly.",
            *("", "| | |", "|---|---|"),
        ]
        lines += [
            f"| {name.partition(', ')[2] or name} | {_told(c)} |" for name, c in faults.items()
        ]
    return "\n".join(lines)


GOOD = ("same", "ok")


def _told(cell: dict[str, Any]) -> str:
    if cell["outcome"] == "same":
        return f"{cell['difference']:.0e}"
    return cell["outcome"] if cell["outcome"] in ("ok", "refused") else f"**{cell['outcome']}**"


if __name__ == "__main__":
    sys.exit(main())
