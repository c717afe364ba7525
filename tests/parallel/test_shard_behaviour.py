"""When sharded ranks talk, in which precision they compute, and what may change between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F

import paceline
from paceline.layout import Layout
from paceline.parallel.shard import Sharding, shard
from parallel import shard_cases
from parallel.shard_cases import Loss


def mesh(layout: str) -> Any:
    return paceline.World.current().mesh(Layout.parse(layout))


def count_messages(layout: str) -> list[tuple[int, int, int]]:
    """Gathers, exchanges and all-reduces of each of three microbatches."""
    stage = Layout.parse(layout).zero
    root = Loss(shard_cases.build("gpt"))
    cut = shard(root, mesh(layout), stage=stage, sharding=Sharding(), model=root.model)
    counts = []
    for index in range(3):
        with CommDebugMode() as messages:
            cut.communicate(last=index == 2)
            root(shard_cases.parts(0, 0, 2)[index]).total.backward()
        found = {str(name): times for name, times in messages.get_comm_counts().items()}
        counts.append(
            tuple(
                sum(times for name, times in found.items() if kind in name)
                for kind in ("allgather", "alltoall", "allreduce")
            )
        )
    return counts


def count_all(layouts: list[str]) -> list[Any]:
    return [count_messages(layout) for layout in layouts]


@pytest.mark.world(4)
def test_ranks_talk_when_the_stage_says_so(ranks: Any) -> None:
    """Two blocks and the root, whose parameters stay gathered between forward and backward."""
    layouts = ["dp=4,zero=1", "dp=4,zero=2", "dp=4,zero=3", "dp=4,replicas=2,zero=2"]
    one, two, three, copies = ranks(count_all, layouts)[0]
    assert one == [(3, 0, 0), (0, 0, 0), (0, 3, 0)]
    assert two == [(3, 3, 0), (0, 3, 0), (0, 3, 0)]
    assert three == [(5, 3, 0), (5, 3, 0), (5, 3, 0)]
    assert copies == [(3, 3, 0), (0, 3, 0), (0, 3, 3)]


class Regression(nn.Module):
    """What it computes in is written down; a buffer makes numbers float32 on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.second = nn.Linear(8, 3)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x)
        self.seen.append(x.dtype)
        y = self.second(self.norm(x) * self.scale)
        self.seen.append(y.dtype)
        return {"y": y}


class RegressionLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = Regression()

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        y = self.model(x)["y"]
        assert y.dtype == target.dtype == torch.float32
        return F.mse_loss(y, target)


def train_in_low_precision(autocast: bool, dtype: Any) -> tuple[list[float], bool]:
    rank = paceline.World.current().rank
    root = RegressionLoss()
    cut = shard(
        root, mesh("dp=2,zero=3"), stage=3, sharding=Sharding(dtype=dtype), model=root.model
    )
    optimizer = torch.optim.AdamW(root.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)
    losses = []
    for _ in range(4):
        cut.communicate(last=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = root(x[rank::2], target[rank::2])
        loss.backward()
        cut.finish()
        kinds = {t.dtype for p in root.parameters() for t in (p, p.grad)}
        assert kinds == {torch.float32}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    wanted = torch.float32 if dtype is None else torch.bfloat16
    return losses, set(root.model.seen) == {wanted}


def train_in_all_precisions() -> Any:
    return [
        train_in_low_precision(*how) for how in ((False, None), (False, "bf16"), (True, "bf16"))
    ]


@pytest.mark.world(2)
def test_low_precision_computes_in_it_and_keeps_float32_for_all_else(ranks: Any) -> None:
    for (expected, _), *lower in ranks(train_in_all_precisions):
        for losses, as_asked in lower:
            assert as_asked
            assert losses == pytest.approx(expected, rel=0.02)
            assert losses != expected


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return (self.branches[branch](self.common(x)) * self.temperature).sum()


def use_some_parameters() -> list[list[str]]:
    """Which parameters have a gradient: different branches, a placeholder, thawed, after a fault."""
    rank = paceline.World.current().rank
    model = Branches()
    model.common.bias.requires_grad_(False)
    cut = shard(model, mesh("dp=2,zero=3"), stage=3, sharding=Sharding(units=[]))
    found = []

    def step(branch: int, counts: bool = True) -> None:
        cut.communicate(last=True, counts=counts)
        (model(torch.ones(2, 4), branch) * counts).backward()
        cut.finish()
        found.append(sorted(n for n, p in model.named_parameters() if p.grad is not None))
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            parameter.grad = None

    step(rank)
    step(0 if rank == 0 else 2, counts=rank == 0)
    model.common.bias.requires_grad_(True)
    model.branches.requires_grad_(False)
    step(1)
    with torch.no_grad():
        model(torch.ones(2, 4), 0)
    assert isinstance(model.temperature, DTensor)  # evaluation puts it back
    model.state_dict()
    step(1)
    return found


@pytest.mark.world(2)
def test_parameters_nobody_used_have_no_gradient(ranks: Any) -> None:
    for found in ranks(use_some_parameters):
        assert found[0] == [
            "branches.0.bias", "branches.0.weight", "branches.1.bias", "branches.1.weight",
            "common.weight", "temperature",
        ]  # fmt: skip
        assert found[1] == ["branches.0.bias", "branches.0.weight", "common.weight", "temperature"]
        assert found[2] == found[3] == ["common.bias", "common.weight", "temperature"]


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fails = False
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if self.fails and index == 2:
                raise RuntimeError("out of patience")
            x = layer(x)
        return (x * self.gain).sum()


def go_on_after_a_fault(stage: int) -> bool:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Fails()
    cut = shard(model, mesh(f"dp=2,zero={stage}"), stage=stage, sharding=Sharding())
    gradients = []
    for fails in (False, True, False):
        for index in range(2):
            cut.communicate(last=index == 1)
            model.fails = fails and index == 1
            try:
                model(torch.ones(2, 4)).backward()
            except RuntimeError:
                cut.reset()
        if not fails:
            cut.finish()
            gradients.append([p.grad.full_tensor().clone() for p in model.parameters()])
            for parameter in model.parameters():
                parameter.grad = None
    return all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def go_on_with_every_stage() -> list[bool]:
    return [go_on_after_a_fault(stage) for stage in (1, 2, 3)]


@pytest.mark.world(2)
def test_a_step_that_failed_half_way_can_be_forgotten(ranks: Any) -> None:
    assert ranks(go_on_with_every_stage) == [[True] * 3] * 2


def call_parts() -> bool:
    model = shard_cases.build("gpt")
    expected = model(torch.zeros(1, 4, dtype=torch.long)).detach()
    cut = shard(Loss(model), mesh("dp=2,zero=3"), stage=3, sharding=Sharding(), model=model)
    with torch.no_grad(), cut.gathered():
        hidden = model.tokens(torch.zeros(1, 4, dtype=torch.long)) + model.positions(
            torch.arange(4)
        )
        for block in model.blocks:
            hidden = block(hidden)
        got = model.head(model.norm(hidden))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return torch.allclose(got, expected)


@pytest.mark.world(2)
def test_parts_of_a_model_can_be_called_while_it_is_gathered(ranks: Any) -> None:
    assert ranks(call_parts) == [True, True]


def shard_alone() -> bool:
    """One process is a world too: same numbers, with nothing to exchange."""
    root = Loss(shard_cases.build("odd"))
    cut = shard(root, mesh("dp=1,zero=3"), stage=3, sharding=Sharding(), model=root.model)
    part = shard_cases.parts(0, 0, 2)[0]
    plain = Loss(shard_cases.build("odd"))
    plain(part).total.backward()
    cut.communicate(last=True)
    root(part).total.backward()
    cut.finish()
    for (name, got), wanted in zip(root.named_parameters(), plain.parameters(), strict=True):
        assert (got.grad is None) == (wanted.grad is None), name
        if wanted.grad is not None:
            torch.testing.assert_close(got.grad.full_tensor(), wanted.grad)
    return True


@pytest.mark.world(1)
def test_one_rank_can_shard_too(ranks: Any) -> None:
    assert ranks(shard_alone) == [True]
