"""A run that early stopping has ended stays ended, unless it is given more to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline import events
from paceline.checkpoint.restore import OpenedCheckpoint
from paceline.errors import CheckpointError


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(16, 4, generator=generator), torch.randn(16, 1, generator=generator)
    )


def trainer(run_dir: Path, patience: int = 2, schedule: bool = False) -> paceline.Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # never improves
    stepped = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return paceline.Trainer(
        model,
        optimizer=optimizer,
        loss=nn.MSELoss(),
        global_batch=8,
        run_dir=run_dir,
        progress=False,
        callbacks=[paceline.EarlyStopping(patience=patience)],
        schedule=stepped if schedule else None,
    )


def steps(history: Any) -> list[int]:
    return [record.step for record in history.steps]


def test_it_trains_nothing_more_and_says_why(tmp_path: Path) -> None:
    history = trainer(tmp_path).fit(data(), data(), epochs=9)
    assert (history.reason, steps(history)) == ("stopped", [1, 2, 3, 4, 5, 6])
    for _ in range(2):
        again = trainer(tmp_path)
        history = again.fit(data(), data(), epochs=9, resume=True)
        assert (history.reason, again.step) == ("stopped", 6)
        assert steps(history) == [1, 2, 3, 4, 5, 6]
    notes = [e.message for e in events.read(tmp_path) if isinstance(e, events.Note)]
    assert notes[-1].startswith("stopped at step 6: loss has not improved for 2 evaluations")
    # A shorter run is no new wish either.
    assert trainer(tmp_path).fit(data(), data(), epochs=4, resume=True).reason == "stopped"


@pytest.mark.parametrize(
    ("patience", "length", "last"),
    [(3, {"epochs": 9}, 8), (2, {"epochs": 10}, 10), (2, {"steps": 8}, 8)],
)
def test_more_patience_or_a_longer_run_goes_on(
    patience: int, length: dict[str, int], last: int, tmp_path: Path
) -> None:
    trainer(tmp_path).fit(data(), data(), epochs=9)
    history = trainer(tmp_path, patience).fit(data(), data(), resume=True, **length)
    assert steps(history) == list(range(1, last + 1))


@pytest.mark.parametrize(
    ("name", "tampered", "problem"),
    [
        ("loop", {"_run": "no"}, "state of the loop .* there is no field '_run'"),
        ("loop", {"engine": None}, "there is no field 'engine'"),
        ("loop", {"epoch_samples": "many"}, "epoch_samples cannot be 'many'"),
        ("loop", {"best": [1.0, "a"]}, "best cannot be"),
        ("loop", {"last_metrics": {"loss": []}}, "last_metrics cannot be"),
        ("loop", {"evaluation_due": 1}, "evaluation_due cannot be 1"),
        ("loop", None, "it is a list, not a mapping"),
        ("callbacks", None, "is not a list of names with their states|has no"),
        ("EarlyStopping", {"waited": -1}, "EarlyStopping .* waited cannot be -1"),
        ("EarlyStopping", {"patience": 9}, "there is no field 'patience'"),
        ("schedule", {"last_epoch": "now"}, "last_epoch='now'"),
    ],
)
def test_a_checkpoint_gives_values_to_known_fields_alone(
    name: str, tampered: Any, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(tmp_path, schedule=True).fit(data(), data(), epochs=1)
    read = OpenedCheckpoint.read_object

    def tamper(self: OpenedCheckpoint, asked: str) -> Any:
        value = read(self, asked)
        if asked == name:
            return {**value, **tampered} if tampered is not None else ["x"]
        if asked == "callbacks" and name == "EarlyStopping":
            return [(kind, {**state, **tampered}) for kind, state in value]
        if asked == "engine" and name == "schedule":
            return {**value, "schedule": {**value["schedule"], **tampered}}
        return value

    monkeypatch.setattr(OpenedCheckpoint, "read_object", tamper)
    with pytest.raises(CheckpointError, match=problem):
        trainer(tmp_path, schedule=True).fit(data(), data(), epochs=2, resume=True)


def test_torchs_schedulers_take_no_new_attributes(tmp_path: Path) -> None:
    from paceline.engine.learning_rate import load_schedule

    schedule = trainer(tmp_path, schedule=True).engine_options["schedule"]
    load_schedule(schedule, {**schedule.state_dict(), "last_epoch": 4, "get_lr": "mine"})
    assert schedule.last_epoch == 4
    assert callable(schedule.get_lr)
