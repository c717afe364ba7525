"""Hostile input: mutated checkpoints, run folders, configs and messages to the stores.

Each case is made from something sound by a few mutations that the seed decides, and run in a
forked process: a command of the ``paceline`` line, or what reads the messages of other machines.
It may say whatever it likes and end with any status. It must not end by a traceback, take more than
ten seconds or two gigabytes, write control characters to the terminal, touch a file outside of its
folder (links and paths in the input lead there), or signal a process that is not its own (the input
names one that notes every signal).

    python benchmarks/fuzz.py [--cases 5000] [--seed 0] [--kind KIND]... [--case KIND:NUMBER]

Each case is shut in before anything hostile is made (fuzzing/isolation.py): every file system but
its own folder is read-only for it, and there are no processes but its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checkpointing import report
from fuzzing import isolation, template
from fuzzing.cases import KINDS, Maker
from fuzzing.sandbox import Outcome, run_case

_RECIPES = Path(__file__).parents[1] / "recipes"


def main() -> None:
    """See the module."""
    options = _options()
    if reason := isolation.unavailable():
        sys.exit(f"fuzz.py shuts each case in, and here that cannot be done: {reason}")
    found = fuzz(options.cases, options.seed, options.kind or KINDS, options.limit, options.case)
    _show(found)
    report.write("fuzz", found, options.json)
    sys.exit(0 if found["good"] else 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--limit", type=float, default=10.0, help="seconds that a case may take")
    parser.add_argument("--case", help="run this one alone, like run:17, and show what it did")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def fuzz(
    cases: int, seed: int, kinds: Any = KINDS, limit: float = 10.0, only: str | None = None
) -> dict[str, Any]:
    """Run so many cases, as many of each kind; figures and everything that went wrong."""
    _warm_up()
    chosen = [(kinds[number % len(kinds)], number // len(kinds)) for number in range(cases)]
    if only is not None:
        kind, _, number = only.partition(":")
        chosen = [(kind, int(number))]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        outside = _bait(folder / "outside")
        maker = Maker(
            template.make_run(folder), template.make_weights(folder), _RECIPES, outside, seed
        )
        started = time.monotonic()
        outcomes = _run_all(maker, chosen, folder, limit)
    return _figures(chosen, outcomes, seed, time.monotonic() - started)


def _run_all(
    maker: Maker, chosen: list[tuple[str, int]], folder: Path, limit: float
) -> list[Outcome]:
    outcomes = []
    for number, (kind, index) in enumerate(chosen):
        prepare = maker.make(kind, index)
        outcome = run_case(prepare, folder, f"box{number}", maker.outside, limit)
        if "hang" in outcome.wrong:
            # A machine that does other things, too: once more before it counts.
            again = run_case(prepare, folder, f"again{number}", maker.outside, limit)
            if "hang" not in again.wrong:
                outcome = again
        outcomes.append(outcome)
        if outcome.wrong:
            _tell(kind, index, outcome)
        elif sys.stderr.isatty() and number % 50 == 0:
            print(f"\r{number} of {len(chosen)}", end="", file=sys.stderr)
    return outcomes


def _tell(kind: str, index: int, outcome: Outcome) -> None:
    print(f"{kind}:{index} {' '.join(outcome.command)!r} {outcome.done}", file=sys.stderr)
    for what, words in outcome.wrong.items():
        print(f"  {what}: {words}", file=sys.stderr)


def _figures(
    chosen: list[tuple[str, int]], outcomes: list[Outcome], seed: int, seconds: float
) -> dict[str, Any]:
    rows = {}
    for kind in dict.fromkeys(kind for kind, _ in chosen):
        of_kind = [o for (k, _), o in zip(chosen, outcomes, strict=True) if k == kind]
        wrong = Counter(what for outcome in of_kind for what in outcome.wrong)
        rows[kind] = {
            "cases": len(of_kind),
            "refused": sum(outcome.status not in (0, None) for outcome in of_kind),
            "tracebacks": wrong["traceback"] + wrong["thread"] + wrong["killed"],
            "hangs": wrong["hang"],
            "outside": wrong["outside"],
            "signalled": wrong["signalled"],
            "escapes": wrong["escapes"],
            "slowest": max(outcome.seconds for outcome in of_kind),
        }
    bad = [
        {"case": f"{kind}:{index}", **asdict(outcome)}
        for (kind, index), outcome in zip(chosen, outcomes, strict=True)
        if outcome.wrong
    ]
    return {"seed": seed, "seconds": seconds, "kinds": rows, "bad": bad, "good": not bad}


def _show(found: dict[str, Any]) -> None:
    columns = ("cases", "refused", "tracebacks", "hangs", "outside", "signalled", "escapes")
    rows = [
        [kind, *(str(row[name]) for name in columns), f"{row['slowest']:.1f} s"]
        for kind, row in found["kinds"].items()
    ]
    report.show("Hostile input", ("kind", *columns, "slowest"), rows)
    report.console.print(f"{found['seconds']:.0f} s")


def _bait(outside: Path) -> Path:
    """Files that must stay as they are, and that the cases have every right to change."""
    outside.mkdir()
    for name in ("victim", "rank0.log", "manifest.json", "config.yaml"):
        (outside / name).write_text("leave me alone\n")
    return outside


def _warm_up() -> None:
    """Import whatever a case may need, so that each fork has it."""
    import safetensors.torch
    import torch

    import paceline.checkpoint.diff
    import paceline.checkpoint.pruning
    import paceline.checkpoint.weights.export
    import paceline.checkpoint.weights.import_weights
    import paceline.cli.app
    import paceline.cli.checkpoint_prune
    import paceline.cli.checkpoint_views
    import paceline.config
    import paceline.diagnose.story
    import paceline.diagnose.story.report
    import paceline.track.console  # noqa: F401

    assert safetensors.torch
    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
