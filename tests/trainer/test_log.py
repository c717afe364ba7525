"""Logged numbers: one value of all microbatches and ranks, right by count, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline import events
from paceline.errors import LossError, TrainingError
from paceline.log_values import current
from paceline.testing import RankPool
from paceline.track.scalars import scalars

N = 13  # with global batches of 5: uneven shares and microbatches, and a last batch of 3


def dataset(n: int = N) -> TensorDataset:
    x = torch.randn(N, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)[:n]
    return TensorDataset(x, x.sum(1, keepdim=True))


class Talking(nn.Module):
    """Logs before, between and after its layers, so that every pipeline stage has its say."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)
        self.third, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        paceline.log("samples", float(len(x)), reduce="sum")  # known on every stage: counted once
        h = self.second(self.first(x).tanh())
        paceline.log("hidden", h.square().mean())
        h = self.third(h.tanh())
        paceline.log("highest", h.max(), reduce="max")
        paceline.log("lowest", h.min(), reduce="min")
        return self.last(h.tanh())


def loss(output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    error = (output - target).abs()
    big = error > 1
    return {
        "loss": error.square().mean(),
        "absolute": error.mean(),
        "of_big": (error[big].sum(), big.sum()),
    }


class Norm(paceline.Callback):
    """Logs from outside of a forward pass: each rank its own number."""

    def on_step_end(self, trainer: paceline.Trainer, result: Any) -> None:
        trainer.log("step_twice", 2.0 * trainer.step)
        trainer.log("top_rank", trainer.engine.world.rank, reduce="max")


def fit(layout: str, folder: Path | None = None, **options: Any) -> paceline.History:
    model = Talking()
    trainer = paceline.Trainer(
        model,
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        global_batch=5,
        precision="fp64",
        layout=layout,
        progress=False,
        run_dir=folder,
        **{"microbatch": 2, "callbacks": [Norm()], **options},
    )
    return trainer.fit(dataset(), dataset(7), epochs=2)


def by_hand() -> list[dict[str, float]]:
    """The numbers of the first epoch's batches."""
    model = Talking().double()
    seen: list[dict[str, float]] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in paceline.loader(dataset(), global_batch=5, seed=0, rank=0, size=1):
        x, y = batch
        h = model.second(model.first(x).tanh())
        after = model.third(h.tanh())
        error = (model.last(after.tanh()) - y).abs()
        values = {
            "samples": torch.tensor(float(len(x))),
            "hidden": h.square().mean(),
            "highest": after.max(),
            "lowest": after.min(),
            "absolute": error.mean(),
            "of_big": error[error > 1].mean(),
        }
        seen.append({name: value.item() for name, value in values.items()})
        optimizer.zero_grad()
        error.square().mean().backward()
        optimizer.step()
    return seen


@pytest.mark.parametrize("layout", ["dp=1", "dp=3", "dp=2,zero=3", "tp=2", "pp=2"])
def test_the_same_numbers_on_every_layout(layout: str, rank_pool: RankPool, tmp_path: Path) -> None:
    size = paceline.Layout.smallest(layout).world_size
    # A sum over microbatches is the number of samples however they are cut.
    history = rank_pool.run(fit, layout, tmp_path, world_size=size)[0]
    expected = by_hand()
    for step, values in zip(history.steps, expected, strict=False):
        assert step.logged == pytest.approx(values, abs=1e-9), step.step
    assert history.logged("step_twice") == [2.0 * n for n in range(1, 7)]
    assert history.logged("top_rank") == [size - 1.0] * 6
    epoch = history.epochs[0].logged
    weights = [values["samples"] for values in expected]
    mean = sum(w * v["absolute"] for w, v in zip(weights, expected, strict=True)) / sum(weights)
    assert epoch["absolute"] == pytest.approx(mean, abs=1e-9)
    assert epoch["samples"] == N
    assert epoch["highest"] == pytest.approx(max(v["highest"] for v in expected), abs=1e-9)
    metrics = history.evals[-1].metrics
    assert metrics["samples"] == 7
    assert {"loss", "absolute", "of_big", "hidden", "highest", "lowest"} <= metrics.keys()
    read = paceline.History.read(tmp_path)
    assert read.logged("hidden") == history.logged("hidden")
    names = {name for event in events.read(tmp_path) for name, _ in scalars(event)}
    assert {"train/hidden", "train/step_twice", "epoch/hidden", "validation/hidden"} <= names


@pytest.mark.world(2)
def test_no_message_more_in_a_step(ranks: Any) -> None:
    for with_logs, without in ranks(count_messages):
        assert with_logs == without


def talk(model: nn.Module, batch: Any) -> torch.Tensor:
    value = be_quiet(model, batch)
    paceline.log("a", value)
    paceline.log("b", value, reduce="max")
    return value


def be_quiet(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def count_messages() -> list[int]:
    """Collectives of a step whose names are known, with and without logging."""
    counts = []
    real = torch.distributed.all_reduce
    calls: list[int] = []

    def counted(*arguments: Any, **more: Any) -> Any:
        calls.append(1)
        return real(*arguments, **more)

    for forward, names in ((talk, {"a", "b"}), (be_quiet, set())):
        engine = paceline.Engine(nn.Linear(4, 1), forward=forward, optimizer=torch.optim.SGD)
        batch = [part.float() for part in dataset(4)[:]]
        engine.step(batch)
        calls.clear()
        torch.distributed.all_reduce = counted
        try:
            assert engine.step(batch).logged.keys() == names
        finally:
            torch.distributed.all_reduce = real
        counts.append(len(calls))
    return counts


class Block(nn.Module):
    """Logs inside of what is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        paceline.log("blocks", 1.0, reduce="sum")
        return self.layer(x)


def test_what_is_computed_again_is_not_logged_again() -> None:
    model = nn.Sequential(Block(), Block(), nn.Linear(4, 1))
    engine = paceline.Engine(
        model,
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        checkpoint_activations="full",
        precision="fp64",
    )
    assert engine.step(dataset(4)[:]).logged == {"blocks": 2.0}


def local_steps() -> Any:
    return fit("dp=2", local_steps=2, microbatch=None)


@pytest.mark.world(2)
def test_replicas_that_train_alone_report_when_they_meet(ranks: Any) -> None:
    history = ranks(local_steps)[0]
    counted = [
        record.values["samples"] for record in history.from_callbacks if "samples" in record.values
    ]
    assert sum(counted) + sum(s.logged.get("samples", 0) for s in history.steps) == 2 * N


def test_what_cannot_be_logged_is_refused_and_elsewhere_nothing_happens() -> None:
    paceline.log("anything", 1.0)  # nobody runs a model: a model can be called by hand
    assert current() is None
    with pytest.raises(TrainingError, match=r"shape \(2,\), not one number"):
        paceline.log("two", torch.zeros(2))
    with pytest.raises(TrainingError, match="one of mean, sum, max, min"):
        paceline.log("x", 1.0, reduce="median")  # type: ignore[arg-type]
    engine = paceline.Engine(
        nn.Linear(4, 1), loss=lambda o, t: {"kl": o.mean()}, optimizer=torch.optim.SGD
    )
    batch = [part.float() for part in dataset(4)[:]]
    with pytest.raises(LossError, match="a dict of kl, without 'loss'"):
        engine.step(batch)
