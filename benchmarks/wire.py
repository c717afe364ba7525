"""Training over slow links: Paceline's wire formats, DDP, DDP's own hooks and Accelerate.

Two hosts (network namespaces on this machine), a rank each, joined by a link of so many Mbit/s and
of so many milliseconds in each direction (a round trip takes twice as long). Every way trains the
same 25M-parameter byte GPT on the same text, in the same order, with the same optimizer, until it
has done ``--steps`` steps and ``--seconds`` have passed, for at most ``--most`` seconds. Told are
the median step time, the bytes a rank sends in a step, as counted by who trains and by the kernel's
interface, and the loss after equal steps and after equal wall time. What plain DDP's loss is after
a step does not depend on the link: it is taken from a run of its own on the loopback.

The second part trains the demo over the last link, each step together, and in local steps (DiLoCo)
after a start together.

    python benchmarks/wire.py [--links 1000 100:5] [--steps 60] [--seconds 40] [--most 75]
                              [--settings NAME...] [--part formats|diloco] [--outer 1/0.5...]

Needs root, for the hosts, and Accelerate (``pip install 'paceline[bench]'``).
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from checkpointing import report
from wiring import diloco, judging
from wiring.link import LOOPBACK, Link, linked
from wiring.running import Job, Outcome, Step, run
from wiring.task import Task
from wiring.ways import BASELINES, FORMATS, PLAIN, Way, in_one_bucket, paceline_format

from paceline.testing.hosts import hosts_available

TASK = Task(layers=8, heads=8, width=512, context=64, global_batch=2, lr=3e-4, warmup=10)
_WIDTH = 150
WAYS = [
    *BASELINES,
    *(
        paceline_format(f"Paceline {text}", text)
        for text in (*FORMATS, "topk:0.03+fp16", "powersgd:16+fp16")
    ),
    paceline_format("Paceline sign, no feedback", "sign", error_feedback=False),
    *(
        in_one_bucket(paceline_format(f"Paceline {text}", text))
        for text in ("powersgd:1", "powersgd:4+fp16", "powersgd:16+fp16")
    ),
]


def main() -> None:
    """See the module."""
    options = _options()
    report.console.width = max(report.console.width, _WIDTH)
    if (reason := hosts_available()) and options.links != [LOOPBACK]:
        sys.exit(f"wire.py needs hosts: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="wire-") as folder:
        if "formats" in options.part:
            _formats(options, Path(folder))
        if "diloco" in options.part:
            rounds = diloco.Rounds(
                options.outer, options.exchange, options.start, options.start_format
            )
            told = diloco.compare(Path(folder), options.links[-1], rounds, options.local_steps)
            path = options.json and options.json.with_stem(f"{options.json.stem}_diloco")
            report.write("wire_diloco", told, path)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--links", type=Link.parse, nargs="+", default=[Link(1000), Link(100, 5)],
        metavar="MBIT[:MS]", help="Mbit/s and milliseconds in each direction, or loopback",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=60, help="after which losses are compared")
    parser.add_argument("--seconds", type=float, default=40, help="the wall time everybody gets")
    parser.add_argument("--most", type=float, default=75, help="seconds for who is slower")
    parser.add_argument("--settings", nargs="+", help="only ways with one of these in their names")
    parser.add_argument("--part", action="append", choices=["formats", "diloco"])
    parser.add_argument("--local-steps", type=int, default=1500, help="steps of the second part")
    parser.add_argument(
        "--outer", nargs="+", default=["1/0.5"], metavar="LR/MOMENTUM",
        help="outer optimizers of the second part",
    )  # fmt: skip
    parser.add_argument("--exchange", default="int8", help="format of what meetings tell")
    parser.add_argument("--start", type=int, default=500, help="steps together before rounds begin")
    parser.add_argument("--start-format", default="sign", help="format of their gradients")
    parser.add_argument("--global-batch", type=int, default=TASK.global_batch)
    parser.add_argument("--context", type=int, default=TASK.context)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.part = options.part or ["formats", "diloco"]
    return options


def _formats(options: argparse.Namespace, folder: Path) -> None:
    task = replace(TASK, global_batch=options.global_batch, context=options.context)
    wanted = [w for w in WAYS if not options.settings or w == PLAIN or _named(w, options.settings)]
    steps, seconds, most = options.steps, options.seconds, options.most
    told: dict[str, Any] = {}
    content = {"task": asdict(task), "steps": steps, "seconds": seconds, "links": told}

    def enough(done: list[Step]) -> bool:
        passed = done[-1].time - done[0].time
        return (passed >= seconds and done[-1].number >= steps) or passed >= most

    reference = _reference(task, folder, steps)
    try:
        for link in options.links:
            outcomes: list[Outcome] = []
            rows: list[judging.Row] = []
            with linked(link) as hosts, report.progress(str(link), len(wanted)) as advance:
                for number, way in enumerate(wanted):
                    where = folder / str(link.megabits) / str(number)
                    outcomes.append(run(Job(way, task, where), hosts, enough))
                    rows = judging.rows(outcomes, outcomes[0], reference, steps, seconds)
                    told[str(link)] = [_told(row) for row in rows]
                    advance()
            _show(link, rows, options)
    finally:  # what is done when somebody stops it is worth keeping
        report.write("wire", content, options.json)


def _named(way: Way, names: list[str]) -> bool:
    return any(name in way.name for name in names)


def _reference(task: Task, folder: Path, steps: int) -> list[Step]:
    """Plain DDP on the loopback."""
    began = time.monotonic()
    with linked(LOOPBACK) as hosts:
        job = Job(PLAIN, task, folder / "reference")
        outcome = run(job, hosts, lambda done: done[-1].number >= steps)
    if outcome.error is not None:
        sys.exit(f"plain DDP does not train on this machine: {outcome.error}")
    seconds = judging.step_seconds(outcome) or 0.0
    report.console.print(
        f"plain DDP on the loopback: {1000 * seconds:.0f} ms/step, loss "
        f"{judging.loss_after(outcome.steps, steps):.4f} after {steps} steps "
        f"({time.monotonic() - began:.0f} s)"
    )
    return outcome.steps


def _told(row: judging.Row) -> dict[str, Any]:
    names = ("kernel_to_counted", "payload_to_counted", "loss_ratio")
    return {**asdict(row), **{name: getattr(row, name) for name in names}}


def _show(link: Link, rows: list[judging.Row], options: argparse.Namespace) -> None:
    report.show(
        f"{link}: a step of a 25M-parameter GPT on 2 hosts; losses are means of "
        f"{judging.WINDOW} steps",
        ["", "steps", "ms/step", "× DDP", "MB/step", "kernel", "ratio", "payload",
         f"loss @{options.steps}", "to DDP", f"loss @{options.seconds:g} s", "steps"],
        [_cells(row, options.steps) for row in rows],
    )  # fmt: skip
    for row in rows:
        if row.error is not None:
            report.console.print(f"{row.name}: {row.error}", soft_wrap=True, markup=False)


def _cells(row: judging.Row, steps: int) -> tuple[str, ...]:
    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    if row.error is not None:
        return (row.name, "fails", *["-"] * 10)
    at = "" if row.compared_at == steps else f" @{row.compared_at}"
    return (
        row.name,
        str(row.steps),
        cell(row.step_s and 1000 * row.step_s, ".0f"),
        cell(row.faster, ".2f"),
        cell(row.counted and row.counted / 1e6, ".3f"),
        cell(row.kernel / 1e6 if row.kernel else None, ".3f"),
        cell(row.kernel_to_counted, ".3f"),
        cell(row.payload_to_counted, ".3f"),
        cell(row.loss, ".4f") + at,
        cell(row.loss_ratio and 100 * (row.loss_ratio - 1), "+.2f") + " %",
        cell(row.by_time, ".4f"),
        cell(row.steps_by_time, "d"),
    )


if __name__ == "__main__":
    main()
