"""What came of a run, from its events."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.events import (
    Baseline,
    CheckpointSaved,
    EvalDone,
    EventLog,
    Restarting,
    RunFinished,
    RunStarted,
    StepDone,
    WireUsed,
)
from paceline.track.summary import Summary


def started(first: int = 0) -> RunStarted:
    return RunStarted(
        layout="dp=1",
        world_size=1,
        device="cpu",
        precision="fp32",
        global_batch=8,
        parameters=1,
        samples_per_epoch=None,
        total_steps=None,
        first_step=first,
    )


def step(number: int, seconds: float) -> StepDone:
    return StepDone(step=number, epoch=0, loss=1 / number, lr=0.1, samples=8, seconds=seconds)


def test_the_last_word_on_everything(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    for event in [
        Baseline(name="unigrams", loss=3.0),
        started(),
        step(1, seconds=100.0),  # a slow first start does not count for the speed of the second
        RunFinished(reason="interrupted", step=1, epoch=0, samples=8, seconds=100.0),
        started(first=1),
        step(2, seconds=0.5),
        EvalDone(step=2, epoch=0, metrics={"loss": 2.0, "accuracy": 0.5}, samples=1, seconds=1.0),
        CheckpointSaved(step=2, path="c.pt", bytes=1, seconds=0.1, reason="end"),
        RunFinished(reason="done", step=2, epoch=0, samples=8, seconds=41.0),
    ]:
        log.write(event)
    log.close()
    summary = Summary.read(tmp_path)
    assert summary.lines() == [
        "done: 2 steps, 41 s, 16 samples/s",
        "  train loss       0.5000",
        "  validation loss  2.0000  (unigrams: 3.0000)",
        "  validation accuracy 0.5000",
        "  checkpoint       c.pt",
    ]


def wire(step: int, steps: int, sent: int, what: str = "gradients") -> WireUsed:
    return WireUsed(
        step=step, steps=steps, bytes_sent=[sent * steps], bytes_plain=[2000 * steps], what=what
    )


@pytest.mark.parametrize(
    ("first", "told", "line"),
    [
        (0, [wire(50, 50, 100), wire(60, 10, 100)], "100 B of gradients a step and rank, instead "),
        (
            0,
            [wire(30, 30, 2000, "warmup"), wire(50, 20, 100)],
            "100 B of gradients a step and rank, instead of 2.0 kB (after 30 steps of warm-up)",
        ),
        (
            20,
            [wire(30, 10, 2000, "warmup"), wire(50, 20, 100)],
            "100 B of gradients a step and rank, instead of 2.0 kB (after 30 steps of warm-up)",
        ),
        (
            40,
            [wire(50, 10, 100)],
            "100 B of gradients a step and rank, instead of 2.0 kB "
            "(since it was resumed at step 40)",
        ),
        (
            0,
            [wire(40, 40, 2000, "warmup")],
            "2.0 kB of gradients a step and rank: nothing was compressed, all 40 steps were "
            "warm-up",
        ),
        (
            0,
            [wire(10, 10, 500), wire(60, 50, 40, "distances")],
            "40 B a step and rank, instead of 2.0 kB of gradients (after 10 steps together)",
        ),
    ],
)
def test_bytes_are_those_after_the_warm_up(first: int, told: list[WireUsed], line: str) -> None:
    lines = Summary.of([started(first), *told]).lines()
    assert any(found.startswith(f"  on the wire      {line}") for found in lines)


def test_restarts_are_counted_by_reason() -> None:
    reasons = ("failure", "node_lost", "failure")
    restarts = [Restarting(reason=reason, detail="") for reason in reasons]
    end = RunFinished(reason="done", step=2, epoch=0, samples=8, seconds=41.0)
    summary = Summary.of([started(), *restarts, step(2, seconds=0.5), end])
    assert summary.lines()[-1] == (
        "  restarts         2 × failure, 1 × node lost (paceline diagnose tells more)"
    )


def test_a_run_that_was_cut_short_has_no_end() -> None:
    summary = Summary.of([started(), step(1, seconds=1.0)])
    assert summary.finished is None
    assert summary.lines()[0] == "the run left no record of its end"
    done = RunFinished(reason="done", step=1, epoch=0, samples=1, seconds=1.0)
    again = Summary.of([done, started(first=1), step(2, seconds=1.0)])
    assert again.finished is None, "it goes on"
    refused = Summary.of([done, started(first=1)])
    assert refused.finished == done, "it was started, but has done nothing since"


def test_a_folder_without_events_is_an_empty_summary(tmp_path: Path) -> None:
    assert Summary.read(tmp_path) == Summary()
