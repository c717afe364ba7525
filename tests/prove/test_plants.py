"""Every known bug is caught and named; what no layout can match is told with its reason."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from proof_subjects import adamw, sgd, subject
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.prove._planted import PLANTS
from paceline.testing import RankPool, make_mlp, make_resnet, make_vectors

SPREAD = {
    "missing-all-reduce": ["dp=2,pp=2"],
    "wrong-average": ["dp=2,zero=3"],
    "unscaled-loss": ["dp=2,pp=2"],
    "wrong-accumulation": ["dp=2,zero=1,microbatch=2"],
    "skipped-microbatch": ["dp=2,zero=2,microbatch=2", "pp=2,schedule=zbv,microbatch=4"],
    "local-clip": ["dp=2,tp=2"],
    "double-sample": ["dp=2,zero=3", "pp=2"],
    "stale-parameter": ["pp=2"],
    "stale-shard": ["dp=2,zero=1", "tp=2"],
    "stale-buffer": ["dp=2,zero=2", "pp=2"],
    "stale-tied-weight": ["tp=2"],
    "shard-clip": ["dp=2,zero=3", "tp=2"],
    "wrong-copies": ["dp=4,zero=3,replicas=2"],
    "row-parallel-bias": ["tp=2", "dp=2,zero=2,tp=2"],
    "missing-tp-reduce": ["tp=2", "tp=2,sequence=1"],
    "untied-stages": ["pp=2"],
    "pipeline-scale": ["pp=2", "dp=2,pp=2,microbatch=2"],
}
"""Layouts beyond plain data parallelism on which each plant makes sense."""


def data_parallel_alone(plant: str) -> bool:
    """Whether plain data-parallel ranks can have this bug."""
    needs = PLANTS[plant]
    return max(needs.tp, needs.pp, needs.replicas) == 1 and not (needs.split or needs.parts)


@pytest.mark.parametrize("plant", [name for name in PLANTS if data_parallel_alone(name)])
def test_every_plant_is_caught_and_named(plant: str, rank_pool: RankPool) -> None:
    report = paceline.verify(
        **subject("resnet" if plant == "stale-buffer" else "gpt"),
        layouts=["dp=3,microbatch=1"],
        global_batch=7,
        steps=2,
        clip_norm=0.05,
        plant=plant,
        pool=rank_pool,
    )
    assert not report.ok
    assert report.rows[0].cause == plant, str(report)
    assert report.notes[-1].endswith("caught on every layout and named")


@pytest.mark.parametrize("plant", PLANTS)
def test_also_where_the_model_is_spread(plant: str, rank_pool: RankPool) -> None:
    report = paceline.verify(
        **subject("resnet" if plant == "stale-buffer" else "certain-gpt"),
        layouts=SPREAD[plant],
        global_batch=9,
        steps=2,
        clip_norm=0.05,
        plant=plant,
        pool=rank_pool,
    )
    assert {row.cause for row in report.rows} == {plant}, str(report)
    words = " ".join(row.words for row in report.rows)
    axis = {
        "shard": "shard",
        "copies": "sharded",
        "tp": "tensor-parallel",
        "row": "tensor-parallel",
    }
    axis |= {"stages": "pipeline", "pipeline": "pipeline"}
    assert all(word in words for part, word in axis.items() if part in plant.split("-"))


@pytest.mark.parametrize("plant", ["missing-all-reduce", "unscaled-loss", "local-clip"])
def test_also_without_accumulation(plant: str, rank_pool: RankPool) -> None:
    report = paceline.verify(
        **subject("mlp"),
        layouts=["dp=4"],
        global_batch=7,
        steps=2,
        clip_norm=0.05,
        plant=plant,
        pool=rank_pool,
    )
    assert report.rows[0].cause == plant, str(report)


@pytest.mark.parametrize("plant", ["missing-all-reduce", "wrong-average", "skipped-microbatch"])
def test_caught_in_the_runs_own_precision(plant: str, rank_pool: RankPool) -> None:
    report = paceline.verify(
        **subject("mlp"),
        layouts=["dp=2,microbatch=2"],
        global_batch=8,
        precision="fp32",
        plant=plant,
        pool=rank_pool,
    )
    assert report.rows[0].cause == plant, str(report)


def test_the_first_tensor_in_the_order_of_execution(rank_pool: RankPool) -> None:
    """The modules are declared in the opposite order of their use."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 4)
            self.first = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.first(x)))

    report = paceline.verify(
        Backwards,
        optimizer=sgd,
        loss=nn.CrossEntropyLoss(),
        data=make_vectors(20),
        layouts=["dp=2"],
        global_batch=6,
        plant="wrong-average",
        pool=rank_pool,
    )
    first = report.rows[0].first
    assert first is not None
    assert (first.kind, first.tensor, first.module, first.step) == (
        "gradient",
        "first.weight",
        "first",
        1,
    )
    assert "off by the factor 2, the number of data-parallel ranks" in report.rows[0].words


def test_plain_batch_norm_is_told_in_words(rank_pool: RankPool) -> None:
    arguments = subject("resnet") | {"model": make_resnet(4), "sync_batchnorm": False}
    report = paceline.verify(**arguments, layouts=["dp=2"], global_batch=8, pool=rank_pool)
    assert report.rows[0].cause == "plain-batch-norm"
    assert "BatchNorm without sync (1, 3.body.1, 3.body.4)" in report.rows[0].words


def contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Every other sample of the batch is a negative."""
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def unmasked_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A mean over classes that are not zero: no mean over samples, and no count is told."""
    kept = target != 0
    return F.cross_entropy(output[kept], target[kept]) if kept.any() else output.sum() * 0


@pytest.mark.parametrize("loss", [contrastive, unmasked_mean])
def test_a_loss_that_is_no_mean_over_samples(loss: Any, rank_pool: RankPool) -> None:
    report = paceline.verify(
        make_mlp(),
        optimizer=adamw,
        loss=loss,
        data=make_vectors(20),
        layouts=["dp=2"],
        global_batch=9,
        pool=rank_pool,
    )
    assert report.rows[0].cause == "samples-interact", str(report)
    assert "the loss is not a mean over samples" in report.rows[0].words


def test_a_forward_that_draws_random_numbers(rank_pool: RankPool) -> None:
    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.randn(x.shape[0], 1)

    report = paceline.verify(
        lambda: Noisy(8, 4),
        optimizer=sgd,
        loss=nn.CrossEntropyLoss(),
        data=[
            (torch.randn(8, generator=torch.Generator().manual_seed(i)), i % 4) for i in range(9)
        ],
        layouts=["dp=2"],
        global_batch=4,
        pool=rank_pool,
    )
    # A shift of all logits does not change the loss: the draw itself is what must be seen.
    assert any("draws random numbers" in note for note in report.notes)


def test_a_layout_that_crashes_fails_and_the_others_go_on(rank_pool: RankPool) -> None:
    def refuses_pairs(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if len(output) == 2:
            raise RuntimeError("two is a crowd")
        return F.cross_entropy(output, target)

    report = paceline.verify(
        make_mlp(),
        optimizer=sgd,
        loss=refuses_pairs,
        data=make_vectors(12),
        layouts=["dp=3", "dp=2"],
        global_batch=6,
        steps=1,
        pool=rank_pool,
    )
    assert [row.outcome for row in report.rows] == ["failed", "same"], str(report)
    assert "two is a crowd" in str(report)


def test_a_model_that_is_built_differently_each_time(rank_pool: RankPool) -> None:
    def build() -> nn.Module:
        model = make_mlp()
        with torch.no_grad():
            model[0].bias.fill_(time.monotonic_ns() % 1_000_003)
        return model

    report = paceline.verify(
        build,
        optimizer=sgd,
        loss=nn.CrossEntropyLoss(),
        data=make_vectors(12),
        layouts=["dp=2,zero=1"],
        global_batch=6,
        steps=1,
        pool=rank_pool,
    )
    first = report.rows[0].first
    assert first is not None
    assert (report.rows[0].cause, first.tensor, first.step) == ("another-start", "0.bias", 0)


def test_what_is_refused_is_told_and_the_others_go_on(rank_pool: RankPool) -> None:
    """By a rule before anything starts, or by the plan that does not divide."""
    report = paceline.verify(
        **subject("gpt"),
        layouts=["cp=2", "dp=2,zero=3,pp=2,schedule=zbv", "tp=4", "tp=2"],
        global_batch=6,
        steps=1,
        pool=rank_pool,
    )
    outcomes = [row.outcome for row in report.rows]
    assert outcomes == ["refused", "refused", "refused", "same"], str(report)
    assert [row.cause for row in report.rows[:2]] == [
        "axis-not-available",
        "zero-bubble-keeps-parameters",
    ]
    assert "2 heads" in report.rows[2].words
    assert not report.ok
    assert "dp=1,cp=2: refused: cp=2 is not available" in str(report)
    assert "[rule: axis-not-available]" in str(report)
