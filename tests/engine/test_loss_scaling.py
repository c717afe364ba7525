"""The settings of the gradient scaler of fp16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.errors import TrainingError

SETTINGS = {
    "init_scale": 512.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 2,
}


def scaler_after_steps(layout: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    engine = paceline.Engine(
        model,
        loss=F.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        layout=layout,
        precision="fp16",
        loss_scaling=paceline.LossScaling(**SETTINGS),
    )
    batch = (torch.ones(2, 4), torch.zeros(2, dtype=torch.long))
    first = engine.state_dict()["scaler"]
    assert {name: first[name] for name in SETTINGS if name in first} == {
        name: value for name, value in SETTINGS.items() if name != "init_scale"
    }
    assert first["scale"] == 512
    for _ in range(2):
        engine.step(batch)
    return engine.state_dict()["scaler"]


@pytest.mark.parametrize("layout", ["dp=1", "dp=1,zero=3"])
def test_both_kinds_of_scaler_follow_the_settings(ranks: Any, layout: str) -> None:
    [scaler] = ranks(scaler_after_steps, layout, world_size=1)
    assert scaler["scale"] == 2048


def test_a_setting_out_of_bounds_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"loss_scaling: backoff_factor=2 must be a number bet"):
        paceline.LossScaling(backoff_factor=2)
    with pytest.raises(TrainingError, match=r"LossScaling got an unknown argument scale"):
        paceline.LossScaling(scale=2)
