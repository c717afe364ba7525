"""Ranks without a gradient of their own meet the others where those are: on the world's device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.engine.gradients import Gradients
from paceline.engine.loss_scale import AgreedScaler

ELSEWHERE = torch.device("meta")  # stands for a GPU: any device but that of new tensors


class Met(Exception):
    """Where a rank went to meet the others."""


def meet(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    raise Met(str(tensor.device))


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


def test_the_norm_is_taken_on_the_device_of_the_world(
    optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "all_reduce", meet)
    parameters = optimizer.param_groups[0]["params"]
    with pytest.raises(Met, match="meta"):
        Gradients(parameters, lambda parameter: True, ELSEWHERE).norm()


def test_an_overflow_is_looked_for_on_the_device_of_the_world(
    optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "all_reduce", meet)
    with pytest.raises(Met, match="meta"):
        AgreedScaler(ELSEWHERE).unscale_(optimizer)


def half_frozen(layout: str) -> list[float | None]:
    """With ``pp=2`` the first rank holds nothing but frozen layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    model[:2].requires_grad_(False)
    engine = paceline.Engine(
        model,
        loss=F.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        layout=layout,
        clip_norm=0.5,
    )
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [engine.step((x, torch.tensor([0, 1, 2, 3]))).grad_norm for _ in range(2)]


@pytest.mark.world(2)
def test_a_stage_without_anything_to_train_takes_part(ranks: Any) -> None:
    expected = half_frozen("dp=1")
    for norms in ranks(half_frozen, "pp=2"):
        assert norms == pytest.approx(expected)
