"""Sharded modules compute what one process computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import paceline
from paceline.layout import Layout
from paceline.parallel.shard import Sharding, shard
from parallel import shard_cases
from parallel.shard_cases import CLIP, MODELS, PARTS, STEPS, Loss


def train(name: str, layout: str, sharding: Sharding, around_loss: bool = True) -> Any:
    world = paceline.World.current()
    placed = Layout.parse(layout)
    root: nn.Module = Loss(shard_cases.build(name))
    model = root.model
    mesh = world.mesh(placed)
    cut = shard(
        root if around_loss else model, mesh, stage=placed.zero, sharding=sharding, model=model
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(isinstance(p, DTensor) for p in model.parameters())
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    norms = []
    for step in range(STEPS):
        count = shard_cases.batch(step)[1].numel()
        for index, part in enumerate(shard_cases.parts(step, world.rank, world.size)):
            cut.communicate(last=index == PARTS - 1)
            (root(part).total * world.size / count).backward()
        cut.finish()
        whole = [p.grad.full_tensor() for p in trained if p.grad is not None]
        norm = nn.utils.get_total_norm(whole)
        for p in trained:
            if p.grad is not None:
                p.grad.mul_(float((CLIP / (norm + 1e-6)).clamp(max=1)))
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    state = {
        k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()
    }
    return state, norms


def train_all(cases: list[tuple[Any, ...]]) -> list[Any]:
    return [train(*case) for case in cases]


def check(ranks: Any, cases: list[tuple[Any, ...]]) -> None:
    """All cases in one job: a rank that has held a mesh cannot be used again."""
    expected = {name: shard_cases.reference(name, ranks.world_size) for name, *_ in cases}
    for results in ranks(train_all, cases):
        for case, (got_state, got_norms) in zip(cases, results, strict=True):
            state, norms = expected[case[0]]
            torch.testing.assert_close(
                got_norms, norms, rtol=1e-9, atol=1e-12, msg=lambda m, c=case: f"{c}: {m}"
            )
            torch.testing.assert_close(
                got_state, state, rtol=1e-9, atol=1e-12, msg=lambda m, c=case: f"{c}: {m}"
            )


@pytest.mark.world(2, 3)
def test_every_stage_computes_what_one_process_computes(ranks: Any) -> None:
    layouts = [f"dp={ranks.world_size},zero={stage}" for stage in (1, 2, 3)]
    check(ranks, [(name, layout, Sharding()) for name in MODELS for layout in layouts])


@pytest.mark.world(4)
def test_copies_of_sharded_models_compute_what_one_process_computes(ranks: Any) -> None:
    layouts = [f"dp=4,replicas=2,zero={stage}" for stage in (1, 2, 3)]
    check(ranks, [(name, layout, Sharding()) for name in ("odd", "gpt") for layout in layouts])
