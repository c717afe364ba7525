"""The demo over a slow link: all steps together, or rounds of local steps.

What training together comes to does not depend on the link: its loss is that of a run on the
loopback. On the link it does some steps, for their time and bytes, which are alike in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from checkpointing import report

from paceline.config import demo
from paceline.testing.hosts import Host
from wiring.judging import step_seconds
from wiring.link import LOOPBACK, Link, linked
from wiring.running import Job, Outcome, run
from wiring.task import Task
from wiring.ways import Way

EVERY = 50
_WARMUP = 12
_STEPS_ON_THE_LINK = 50
TOGETHER = Way("every step together", "paceline")


@dataclass(frozen=True)
class Rounds:
    """Rounds with each outer optimizer (``"0.7/0.9"``), what is told at a meeting as ``exchange``.

    They begin after ``start`` steps together, whose gradients travel as ``form`` (those of the
    embeddings as int8).
    """

    outer: Sequence[str]
    exchange: str = "int8"
    start: int = 0
    form: str = "none"

    def ways(self) -> list[Way]:
        """One for each outer optimizer."""
        return [self._way(outer) for outer in self.outer]

    def _way(self, outer: str) -> Way:
        rate, _, momentum = outer.partition("/")
        rounds = {"every": EVERY, "start": self.start, "exchange": self.exchange}
        rounds |= {"outer_lr": float(rate), "outer_momentum": float(momentum or 0)}
        settings: dict[str, Any] = {"local_steps": rounds}
        name = f"rounds of {EVERY}, outer {outer}, {self.exchange}"
        if self.start:
            name += f"; {self.start} steps before in {self.form}"
        if self.form != "none":
            settings["compress"] = {
                "format": self.form,
                "rules": dict.fromkeys(("tokens.weight", "positions.weight"), "int8"),
                "warmup_steps": _WARMUP,  # without, signs do much worse from the first step on
                # Adam does better without it: see "Steps to a loss" in docs/benchmarks.md.
                "error_feedback": False if self.form == "sign" else None,
            }
        return Way(name, "paceline", settings)


@dataclass(frozen=True)
class Row:
    """A way to train the demo."""

    name: str
    steps: int
    step_s: float | None
    seconds: float
    kernel: float
    """Bytes that a rank sent in all, by the interface's counter."""
    counted: float | None
    less: float
    """Traffic of training together, divided by this one's."""
    loss: float | None
    """On text that is not trained on, after the last step."""
    loss_ratio: float | None
    error: str | None


def compare(folder: Path, link: Link, rounds: Rounds, steps: int) -> dict[str, Any]:
    """Train the demo together and in ``rounds``, and tell the traffic and the loss."""
    steps -= (steps - rounds.start) % EVERY  # the end of a round
    task = _demo(steps)

    def train(way: Way, where: str, hosts: Sequence[Host] | int, last: int = steps) -> Outcome:
        job = Job(way, task, folder / where, evaluate_at=[steps])
        return run(job, hosts, lambda done: done[-1].number >= last)

    ways = rounds.ways()
    with report.progress("local steps", len(ways) + 2) as advance:
        with linked(LOOPBACK) as hosts:
            together = train(TOGETHER, "together", hosts)
            advance()
        with linked(link) as hosts:
            timed = train(TOGETHER, "timed", hosts, _STEPS_ON_THE_LINK)
            advance()
            rows = [_together(timed, together, steps)]
            for number, way in enumerate(ways):
                rows.append(_row(train(way, f"local{number}", hosts), rows[0]))
                advance()
    report.show(
        f"{link}: {steps} steps of the demo on 2 hosts",
        [
            "",
            "ms/step",
            "s in all",
            "MB sent",
            "kernel",
            "less traffic",
            "held-out loss",
            "to sync",
        ],
        [_cells(row) for row in rows],
    )
    for row in rows:
        if row.error is not None:
            report.console.print(f"{row.name}: {row.error}", soft_wrap=True, markup=False)
    return {"link": str(link), "task": asdict(task), "rows": [asdict(row) for row in rows]}


def _demo(steps: int) -> Task:
    """What ``paceline train`` trains when nothing is said, for so many steps."""
    model = {name: demo.MODEL_ARGS[name] for name in ("layers", "heads", "width", "context")}
    return Task(
        **model,
        global_batch=demo.GLOBAL_BATCH,
        lr=demo.LR,
        clip_norm=demo.CLIP_NORM,
        warmup=demo.WARMUP_STEPS,
        decay=steps,
    )


def _together(timed: Outcome, whole: Outcome, steps: int) -> Row:
    """Some steps on the link stand for ``steps`` of them, with the loss of the ``whole`` run."""
    kernel, counted = _sent(timed)
    times = steps / timed.done if timed.done else 0.0
    return Row(
        name=TOGETHER.name,
        steps=steps,
        step_s=step_seconds(timed),
        seconds=_seconds(timed) * times,
        kernel=kernel * times,
        counted=None if counted is None else counted * times,
        less=1.0,
        loss=_held_out(whole),
        loss_ratio=1.0,
        error=timed.error or whole.error,
    )


def _row(outcome: Outcome, together: Row) -> Row:
    kernel, counted = _sent(outcome)
    loss = _held_out(outcome)
    return Row(
        name=outcome.way.name,
        steps=outcome.done,
        step_s=step_seconds(outcome),
        seconds=_seconds(outcome),
        kernel=kernel,
        counted=counted,
        less=together.kernel / kernel if kernel else 0.0,
        loss=loss,
        loss_ratio=loss / together.loss if loss and together.loss else None,
        error=outcome.error,
    )


def _seconds(outcome: Outcome) -> float:
    return outcome.steps[-1].time - outcome.steps[0].time if outcome.steps else 0.0


def _sent(outcome: Outcome) -> tuple[float, float | None]:
    """Bytes by the kernel and as counted, in all steps."""
    if not outcome.steps:
        return 0.0, None
    first, last = outcome.steps[0], outcome.steps[-1]
    counted = None
    if first.counted is not None and last.counted is not None:
        counted = last.counted - first.counted
    return last.kernel - first.kernel, counted


def _held_out(outcome: Outcome) -> float | None:
    return next((s.held_out for s in outcome.steps if s.held_out is not None), None)


def _cells(row: Row) -> tuple[str, ...]:
    if row.error is not None:
        return (row.name, f"fails after {row.steps} steps", *["-"] * 6)
    return (
        row.name,
        "-" if row.step_s is None else f"{1000 * row.step_s:.0f}",
        f"{row.seconds:.0f}",
        "-" if row.counted is None else f"{row.counted / 1e6:.2f}",
        f"{row.kernel / 1e6:.2f}" if row.kernel else "-",
        f"{row.less:.1f} ×" if row.less else "-",
        "-" if row.loss is None else f"{row.loss:.4f}",
        "-" if row.loss_ratio is None else f"{100 * (row.loss_ratio - 1):+.2f} %",
    )
