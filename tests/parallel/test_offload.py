"""An optimizer whose state is kept elsewhere updates as it would have done where it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import paceline
from paceline.errors import TrainingError
from paceline.layout import Layout
from paceline.parallel.offload import OffloadedState, offload_state
from paceline.parallel.shard import Sharding, shard
from paceline.testing import assert_same, make_mlp

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "groups": lambda p: torch.optim.RMSprop([{"params": p[:2]}, {"params": p[2:], "lr": 1e-3}]),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def run(make: Any, offload: bool) -> Any:
    model = make_mlp(dtype=torch.float64)
    optimizer = make(list(model.parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    if offload:
        OffloadedState(optimizer)
    for number in range(2):
        step(model, optimizer, number)
        schedule.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    other = make_mlp(seed=1, dtype=torch.float64)
    later = make(list(other.parameters()))
    if offload:
        OffloadedState(later)
    other.load_state_dict(saved["model"])  # behind the optimizer's back
    later.load_state_dict(saved["optimizer"])
    assert all(p in later.state for p in other.parameters() if optimizer.state)
    other[0].bias.requires_grad_(False)  # no gradient: left alone
    for number in range(2, 4):
        step(other, later, number)
    return other.state_dict(), later.state_dict()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_schedules_and_checkpoints_are_as_without(name: str) -> None:
    assert_same(run(OPTIMIZERS[name], True), run(OPTIMIZERS[name], False))


def test_what_is_on_the_cpu_already_is_left_alone() -> None:
    assert offload_state(torch.optim.SGD(make_mlp().parameters(), lr=0.1)) is None


def test_optimizers_that_cannot_are_refused() -> None:
    parameters = list(make_mlp().parameters())
    with pytest.raises(TrainingError, match="LBFGS runs the model"):
        OffloadedState(torch.optim.LBFGS(parameters))
    with pytest.raises(TrainingError, match="capturable"):
        OffloadedState(torch.optim.Adam(parameters, capturable=True))
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    OffloadedState(optimizer)
    with pytest.raises(TrainingError, match="without a closure"):
        optimizer.step(lambda: torch.zeros(()))


def test_a_failed_step_leaves_the_optimizer_usable() -> None:
    model = make_mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    OffloadedState(optimizer)
    step(model, optimizer, 0)
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(TypeError):
        step(model, optimizer, 1)
    optimizer.param_groups[0]["lr"] = 0.1
    before = model[0].weight.detach().clone()
    step(model, optimizer, 2)
    assert not torch.equal(before, model[0].weight)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


def train_sharded(kind: str, offload: bool) -> Any:
    world = paceline.World.current()
    model = make_mlp(hidden=13, dtype=torch.float64)
    policy = Sharding(offload="parameters" if kind == "parameters" and offload else None)
    cut = shard(model, world.mesh(Layout.parse("dp=2,zero=3")), stage=3, sharding=policy)
    optimizer = OPTIMIZERS["adamw" if kind == "parameters" else kind](list(model.parameters()))
    if offload and kind != "parameters":
        OffloadedState(optimizer)
    for number in range(3):
        data = torch.randn(
            4, 8, generator=torch.Generator().manual_seed(number), dtype=torch.float64
        )
        cut.communicate(last=True)
        model(data[world.rank :: 2]).square().mean().backward()
        cut.finish()
        optimizer.step()
        optimizer.zero_grad()
    assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
    moments = optimizer.state_dict()["state"]
    return (
        {k: v.full_tensor() for k, v in model.state_dict().items()},
        [v.full_tensor() for s in moments.values() for v in s.values() if isinstance(v, DTensor)],
    )


def train_all(kinds: list[str]) -> Any:
    return [(train_sharded(kind, True), train_sharded(kind, False)) for kind in kinds]


@pytest.mark.world(2)
def test_sharded_parameters_too(ranks: Any) -> None:
    kinds = ["adamw", "fused", "momentum", "parameters"]
    for results in ranks(train_all, kinds):
        for offloaded, plain in results:
            assert_same(offloaded, plain)
            assert len(plain[1]) >= 4
