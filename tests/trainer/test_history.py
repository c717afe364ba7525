"""What a history gathers of the things that befall a run."""

from __future__ import annotations

import pytest

from paceline.errors import TrainingError
from paceline.events import (
    EvalDone,
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


def test_the_best_of_a_metric_is_known_by_its_name_or_said() -> None:
    history = History()
    for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7)):
        metrics = {"loss": 1.0 - accuracy / 2, "val_acc": accuracy, "score": accuracy}
        history.add(EvalDone(step=step, epoch=0, metrics=metrics, samples=4, seconds=1.0))
    for best in (history.best(), history.best("val_acc"), history.best("score", "max")):
        assert best is not None
        assert best.step == 2
    with pytest.raises(TrainingError, match=r"is a larger 'score' better, or a smaller one\?"):
        history.best("score")
    with pytest.raises(TrainingError) as caught:
        history.best("los")
    assert str(caught.value) == (
        "History.best('los'): no evaluation has measured it; there are loss, val_acc, score. Did "
        "you mean 'loss'?"
    )
    assert History().best("accuracy") is None
    assert History(seconds=3.0).total_time == 3.0
