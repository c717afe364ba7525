"""Loops as Accelerate's users write them give Accelerate's own numbers, where the batches are even."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline

pytest.importorskip("accelerate")


def make(kind: str, passes: int) -> Any:
    if kind == "ours":
        return paceline.Accelerator(accumulate=passes, batch_size_is="per_device")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return Accelerator(
        cpu=True, gradient_accumulation_steps=passes, step_scheduler_with_optimizer=False
    )


def data(samples: int, seed: int) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=g, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())


def classifier(kind: str, per_rank: int, passes: int) -> dict[str, Any]:
    """As nlp_example and cv_example: accumulation, clipping, a schedule, metrics on uneven data."""
    torch.manual_seed(0)
    accelerator = make(kind, passes)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    train: Any = DataLoader(data(48, 1), batch_size=per_rank)
    test: Any = DataLoader(data(23, 2), batch_size=per_rank)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    losses, accuracies = [], []
    for _ in range(2):
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.gather(loss.detach()).mean()))
        schedule.step()
        model.eval()
        right = []
        for x, y in test:
            with torch.no_grad():
                found = model(x).argmax(1)
            found, y = accelerator.gather_for_metrics((found, y))
            right += (found == y).tolist()
        assert len(right) == 23
        accuracies.append(sum(right) / len(right))
    return {"losses": losses, "accuracies": accuracies}


def adversaries(kind: str, per_rank: int) -> dict[str, Any]:
    """A GAN: two models and two optimizers."""
    torch.manual_seed(0)
    accelerator = make(kind, 1)
    generator: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    critic: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    of_g: Any = torch.optim.Adam(generator.parameters(), lr=1e-2)
    of_c: Any = torch.optim.Adam(critic.parameters(), lr=1e-2)
    train: Any = DataLoader(data(48, 1), batch_size=per_rank)
    generator, critic, of_g, of_c, train = accelerator.prepare(generator, critic, of_g, of_c, train)
    losses = []
    for x, _ in train:
        fake = generator(x.flip(1))
        of_c.zero_grad()
        judged = critic(torch.cat([x, fake.detach()])).squeeze(1)
        loss = F.softplus(torch.cat([-judged[: len(x)], judged[len(x) :]])).mean()
        accelerator.backward(loss)
        of_c.step()
        of_g.zero_grad()
        of_fake = F.softplus(-critic(fake)).mean()
        accelerator.backward(of_fake)
        of_g.step()
        losses += (
            accelerator.gather(torch.stack([loss.detach(), of_fake.detach()])[None])
            .mean(0)
            .tolist()
        )
    return {"losses": losses}


def everything(kind: str, per_rank: int) -> list[dict[str, Any]]:
    return [
        classifier(kind, per_rank, 1),
        classifier(kind, per_rank, 2),
        adversaries(kind, per_rank),
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_ours_and_theirs_have_the_same_losses(ranks: Any, size: int) -> None:
    ours = ranks(everything, "ours", 12 // size, world_size=size)
    theirs = ranks(everything, "theirs", 12 // size, world_size=size)
    alone = everything("ours", 12)
    for mine, other in zip(ours, theirs, strict=True):
        for found, wanted, one in zip(mine, other, alone, strict=True):
            for name, values in found.items():
                assert values == pytest.approx(wanted[name], rel=1e-9), name
                assert values == pytest.approx(one[name], rel=1e-9), name
