"""How many steps more a wire format needs: a byte GPT on real text, trained to a set loss.

Every format of Paceline (those that leave something behind after 50 steps without compression), and
some with error feedback switched off, trains until the mean loss of
the last steps is at the target, with several seeds (of the weights and of the data's order). Told
is the number of steps to the target, relative to no compression with the same seed.

    python benchmarks/convergence.py [--ranks 2] [--seeds 0 1 2] [--settings NAME...] [--jobs 8]
                                     [--device cuda] [--limit 540] [--json FILE]
    python benchmarks/convergence.py --merge FILE FILE...

Trainings run side by side, ``--jobs`` at a time, each on ``--ranks`` processes that talk over the
loopback. What is done when it is stopped, or when ``--limit`` seconds are over, is kept: the rest
can be done by further calls, whose files ``--merge`` puts together.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from checkpointing import report
from wiring import converging
from wiring.converging import Run
from wiring.ways import FORMATS, Way, paceline_format

FORGETFUL = ["sign", "topk:0.01"]
_WIDTH = 118

_WARMUP = 50
_DENSE = ("none", "fp16", "bf16", "int8")

WAYS = [
    *(
        paceline_format(text, text, warmup_steps=0 if text in _DENSE else _WARMUP)
        for text in FORMATS
    ),
    *(
        paceline_format(f"{text} no feedback", text, error_feedback=False, warmup_steps=_WARMUP)
        for text in FORGETFUL
    ),
]


def main() -> None:
    """See the module."""
    options = _options()
    report.console.width = max(report.console.width, _WIDTH)
    if options.merge:
        runs = _merged(options.merge)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        runs = {}
        with tempfile.TemporaryDirectory(prefix="convergence-") as folder:
            try:
                for run in converging.pool(_wanted(options.settings), options, Path(folder)):
                    runs[run.key] = run
                    converging.say(run)
                    _write(runs, options)
            except (KeyboardInterrupt, SystemExit):
                report.console.print("stopped; what is done is kept")
    _show(runs)
    _write(runs, options)
    report.console.print(f"written to {_path(options)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    names = ", ".join(repr(way.name) for way in WAYS)
    parser.add_argument("--settings", nargs="+", help=f"only these of {names}")
    parser.add_argument("--jobs", type=int, help="trainings at a time; by default, as cores allow")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--target", type=float, default=converging.TARGET, help="loss to reach")
    parser.add_argument("--most", type=int, default=1000, help="steps after which to give up")
    parser.add_argument("--limit", type=float, help="seconds after which to stop with what is done")
    parser.add_argument("--merge", type=Path, nargs="+", help="put results of other calls together")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.jobs = options.jobs or max(1, (os.cpu_count() or 1) // options.ranks)
    return options


def _wanted(names: list[str] | None) -> list[Way]:
    unknown = set(names or ()) - {way.name for way in WAYS}
    if unknown:
        sys.exit(f"no setting {sorted(unknown)}: there are {[way.name for way in WAYS]}")
    return [way for way in WAYS if not names or way.name in names]


def _merged(paths: list[Path]) -> dict[str, Run]:
    """The runs of several files; one that came to its end counts before one that did not."""
    runs: dict[str, Run] = {}
    for path in paths:
        for content in json.loads(path.read_text(encoding="utf-8"))["runs"]:
            run = Run(**content)
            if run.key not in runs or run.finished:
                runs[run.key] = run
    return runs


def _path(options: argparse.Namespace) -> Path:
    return options.json or report.RESULTS / "convergence.json"


def _write(runs: Mapping[str, Run], options: argparse.Namespace) -> None:
    """Put the runs where they are not lost, whole at any time."""
    path = _path(options)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    content = {
        **report.machine(),
        "task": asdict(converging.TASK),
        "rows": [asdict(row) for row in converging.summary(runs.values())],
        "runs": [asdict(run) for run in runs.values()],
    }
    part.write_text(json.dumps(content, indent=1), encoding="utf-8")
    part.replace(path)


def _show(runs: Mapping[str, Run]) -> None:
    targets = sorted({run.target for run in runs.values()})
    report.show(
        f"Steps to a loss of {', '.join(map(str, targets))}, relative to no compression",
        ["", "ranks", "seeds", "steps", "ratio", "least … most", "loss then", "kB/step"],
        [row.cells() for row in converging.summary(runs.values())],
    )


if __name__ == "__main__":
    main()
