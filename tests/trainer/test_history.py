"""What a history gathers of the things that befall a run."""

from __future__ import annotations

from paceline.events import (
    Event,
    HangFound,
    Restarting,
    RunFinished,
    StepDone,
    StepSplit,
    Straggler,
)
from paceline.trainer.history import History


def step(number: int) -> StepDone:
    return StepDone(step=number, epoch=0, loss=1.0, lr=0.1, samples=8, seconds=0.5)


def test_a_history_knows_what_befell_the_run() -> None:
    troubles: list[Event] = [
        StepSplit(step=2, steps=2, phases={"data": [0.1, 0.2]}),
        Straggler(step=2, rank=1, host="beta", phase="data", factor=2.0, costs=0.1, share=0.2),
        HangFound(
            step=2, seconds=60.0, what="data", ranks=[1], summary="", detail="", action="restart"
        ),
        Restarting(reason="hang", detail="", used=1, budget=3),
    ]
    end = RunFinished(reason="done", step=3, epoch=0, samples=24, seconds=2.0)
    history = History.from_events([step(1), step(2), *troubles, step(2), step(3), end])
    assert [s.step for s in history.steps] == [1, 2, 3]
    found = [*history.splits, *history.stragglers, *history.hangs, *history.restarts]
    assert found == troubles, "a step that was done again does not undo them"
