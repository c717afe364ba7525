"""Sharded modules compute what one process computes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import paceline
from paceline.layout import Layout
from paceline.parallel.distributed_model import LossFirst
from paceline.parallel.shard import Sharding, shard
from parallel import shard_cases
from parallel.shard_cases import CLIP, DOUBLE, PARTS, STEPS, Loss

OTHERS = ("mlp", "lstm", "shared", "resnet")
HUGGING_FACE = ("hf-gpt2", "hf-llama", "hf-bert")


def train(name: str, layout: str, sharding: Sharding, around_loss: bool = True) -> Any:
    """The state after some steps, and the norms of the gradients, as this rank sees them."""
    world = paceline.World.current()
    placed = Layout.parse(layout)
    whole = Loss(shard_cases.build(name))
    model = whole.model
    called = LossFirst(whole)  # as the engine does: FSDP2 of torch 2.11 finds no tensor in a Term
    root = called if around_loss else model
    cut = shard(root, world.mesh(placed), stage=placed.zero, sharding=sharding, model=model)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(isinstance(p, DTensor) for p in model.parameters())
    optimizer = shard_cases.make_optimizer(trained)
    norms = []
    for step in range(STEPS):
        count = shard_cases.batch(step)[1].numel()
        for index, part in enumerate(shard_cases.parts(step, world.rank, world.size)):
            cut.communicate(last=index == PARTS - 1)
            with DOUBLE.forward():
                total, _ = called(part, 0)
            (total * world.size / count).backward()
        cut.finish()
        gradients = [p.grad.full_tensor() for p in trained if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad.mul_(float((CLIP / (norm + 1e-6)).clamp(max=1)))
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    held = model.state_dict()
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in held.items()}
    return state, norms


def train_all(cases: list[tuple[Any, ...]]) -> list[Any]:
    return [train(*case) for case in cases]


def check(ranks: Any, cases: list[tuple[Any, ...]]) -> None:
    """All cases in one job: a rank that has held a mesh cannot be used again."""
    expected = {name: shard_cases.reference(name, ranks.world_size) for name, *_ in cases}
    for results in ranks(train_all, cases):
        for case, (got_state, got_norms) in zip(cases, results, strict=True):
            state, norms = expected[case[0]]
            for got, wanted in ((got_norms, norms), (got_state, state)):
                torch.testing.assert_close(
                    got, wanted, rtol=1e-9, atol=1e-12, msg=lambda m, case=case: f"{case}: {m}"
                )


@pytest.mark.world(2)
def test_every_stage_computes_what_one_process_computes(ranks: Any) -> None:
    stages = {"gpt": (1, 2, 3), "odd": (1, 2, 3), **dict.fromkeys(OTHERS, (1, 3))}
    stages |= dict.fromkeys(HUGGING_FACE, (3,))
    check(ranks, [(n, f"dp=2,zero={z}", Sharding()) for n, held in stages.items() for z in held])


@pytest.mark.world(3)
def test_dimensions_that_do_not_divide(ranks: Any) -> None:
    check(ranks, [(n, f"dp=3,zero={z}", Sharding()) for n in ("odd", "lstm") for z in (1, 3)])


@pytest.mark.world(4)
def test_copies_and_other_ways_to_cut(ranks: Any) -> None:
    cases: list[Any] = [("odd", f"dp=4,replicas=2,zero={z}", Sharding()) for z in (1, 2, 3)]
    cases += [
        ("odd", "dp=4,zero=3", Sharding(reshard=2)),
        ("odd", "dp=4,zero=3", Sharding(reshard=False), False),
        ("gpt", "dp=4,zero=3", Sharding(units=[])),
        ("gpt", "dp=4,zero=3", Sharding(units=["blocks.*", "**.mlp"])),
        ("gpt", "dp=4,zero=2", Sharding(offload="parameters")),
    ]
    check(ranks, cases)


def _train_and_drop(layout: str) -> list[bool]:
    """Whether model and parameters live on after their engine."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    held = [weakref.ref(model), *map(weakref.ref, model.parameters())]
    engine = paceline.Engine(
        model,
        loss=torch.nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        layout=layout,
    )
    engine.step((torch.ones(2, 4), torch.ones(2, 1)))
    del model, engine
    gc.collect()
    return [reference() is not None for reference in held]


@pytest.mark.world(2)
def test_a_sharded_model_is_freed_with_its_engine(ranks: Any) -> None:
    """Else the next engine of the process would find the memory taken."""
    for alive in ranks(_train_and_drop, "dp=2,zero=3"):
        assert not any(alive)
