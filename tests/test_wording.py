"""Events in words: one sentence for each, the same on the console and in a diagnosis."""

from __future__ import annotations

import pytest

from paceline.diagnose.story import tell
from paceline.events import (
    CheckpointFailed,
    CheckpointSaved,
    EpochDone,
    EvalDone,
    Event,
    EventsLost,
    HangFound,
    HangOver,
    MemoryMeasured,
    NodeLeft,
    NonFinite,
    Note,
    RankLost,
    RanksStarted,
    Restarting,
    RestoreTried,
    RunFailed,
    RunFinished,
    RunStarted,
    StepDone,
    Straggler,
)
from paceline.events.wording import after_step, at_step, describe, line_of, warns
from paceline.track.scalars import MEMORY

START = RunStarted(
    layout="dp=2",
    world_size=2,
    device="cpu",
    precision="fp32",
    global_batch=8,
    parameters=4,
    samples_per_epoch=64,
    total_steps=100,
)
HANG = HangFound(
    step=5,
    seconds=60.0,
    what="data",
    ranks=[1],
    summary="rank 1 is missing",
    detail="rank 1 is missing\nrank 1: in data loading",
    action="wait",
)
LIVE: list[Event] = [
    RanksStarted(nproc=2, attempt=1),
    START,
    EvalDone(step=5, epoch=0, metrics={"loss": 1.5}, samples=9, seconds=2.0),
    EpochDone(step=6, epoch=0, loss=1.25, samples=100, seconds=9.0),
    CheckpointSaved(step=7, path="x", bytes=10, seconds=0.1, reason="every"),
    CheckpointFailed(step=8, reason="every", error="the disk is full"),
    RestoreTried(rung="checkpoint", step=8, ok=False, detail="bad hash", seconds=0.1),
    NonFinite(step=9, what="loss", ranks=[0], action="skip", detail="In layer 3."),
    EventsLost(count=2, since=0.0, error="no space", time=5.0),
    RankLost(rank=1, host="a", cause="failed", error="no", exit_code=1, step=5, log="l"),
    Restarting(reason="failure", detail="", delay=2.0, used=1, budget=3),
    NodeLeft(host="beta", reason="lost"),
    HANG,
    HangOver(step=5, seconds=75.0),
    Straggler(step=50, rank=1, host="b", phase="data", factor=1.5, costs=0.1, share=0.2),
    Note(message="careful", level="warning"),
]


@pytest.mark.parametrize("event", LIVE, ids=lambda event: type(event).__name__)
def test_the_console_and_a_diagnosis_say_the_same(event: Event) -> None:
    [entry] = [e for e in tell([event]).chapters if e.kind == type(event).__name__]
    line = line_of(event)
    assert line is not None
    assert entry.text in line
    assert entry.trouble == warns(event)


def test_some_things_are_said_afterwards_only() -> None:
    finished = RunFinished(reason="done", step=9, epoch=0, samples=1, seconds=1.0)
    nothing_there = RestoreTried(rung="memory", step=None, ok=False, detail="none", seconds=0.0)
    for event in (finished, nothing_there, RunFailed(rank=0, error="x", exit_code=1)):
        assert line_of(event) is None
        assert describe(event) is not None


def test_events_that_hold_only_numbers_have_no_words() -> None:
    step = StepDone(step=1, epoch=0, loss=1.0, lr=0.1, samples=4, seconds=0.2)
    held = {name: [1] for name in MEMORY}
    for event in (step, MemoryMeasured(step=1, **held)):
        assert describe(event) is None
        assert line_of(event) is None
        assert not warns(event)


def test_a_later_start_says_which_it_is() -> None:
    assert line_of(RanksStarted(nproc=2)) == "starting 2 ranks"
    assert line_of(RanksStarted(nproc=2, attempt=1)) == "starting 2 ranks (start 2)"


def test_steps_in_words() -> None:
    assert [at_step(5), at_step(0), at_step(None)] == [
        "at step 5",
        "before the first step",
        "before the first step",
    ]
    assert after_step(5) == "after step 5"
