"""What is right is found right, on every model and layout."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from proof_subjects import Encodings, adamw, gpt2, subject
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import paceline
from paceline.testing import RankPool, make_mlp, make_vectors

LAYOUTS = ["dp=3,microbatch=1", "dp=2,zero=3", "dp=1,pp=2,schedule=gpipe,microbatch=2"]


def test_hugging_face_model_with_its_own_loss(rank_pool: RankPool) -> None:
    report = paceline.verify(
        **subject("gpt2"), layouts=["dp=2"], global_batch=10, clip_norm=0.5, pool=rank_pool
    )
    assert report.ok, str(report)


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet"])
def test_layouts_are_the_same_as_one_process(name: str, rank_pool: RankPool) -> None:
    report = paceline.verify(
        **subject(name), layouts=LAYOUTS, global_batch=10, clip_norm=0.5, pool=rank_pool
    )
    assert report.ok, str(report)
    assert [row.layout for row in report.rows] == LAYOUTS
    # float64 and a handful of reordered sums: what is left is rounding, far from the bound.
    assert 0 < max(row.difference for row in report.rows) < 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_no_false_alarm(seed: int, rank_pool: RankPool) -> None:
    """Random models, optimizers, batches, clipping and layouts: two a seed, none at fault."""
    choose = random.Random(seed)
    # A norm over one feature gives zero but for rounding, and a ReLU behind it makes a coin of that.
    sizes = [choose.randint(2, 9) for _ in range(choose.randint(2, 4))]
    layers: list[nn.Module] = []
    for inputs, outputs in zip([5, *sizes], [*sizes, 3], strict=True):
        norm = choose.choice([nn.Identity(), nn.LayerNorm(outputs), nn.BatchNorm1d(outputs)])
        activation = choose.choice([nn.ReLU(), nn.GELU(), nn.Dropout(0.3)])
        layers += [nn.Linear(inputs, outputs, bias=choose.random() < 0.8), norm, activation]
    torch.manual_seed(seed)
    model = nn.Sequential(*layers[:-2])
    kinds = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop]
    kind = choose.choice(kinds)
    batch = 2 * choose.randint(2, 5)  # no forward of one sample, which a batch norm refuses
    microbatch = choose.randint(1, batch // 2)
    layouts = [f"dp={choose.randint(1, 4)}", f"dp=2,microbatch={microbatch}"]
    report = paceline.verify(
        model,
        optimizer=lambda parameters: kind(parameters, lr=1e-2),
        loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])),
        data=make_vectors(30, inputs=5, outputs=3, seed=seed),
        layouts=layouts,
        global_batch=batch,
        clip_norm=choose.choice([None, 0.1, 10.0]),
        sync_batchnorm=True,
        pool=rank_pool,
    )
    assert report.ok, str(report)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_own_precision_is_judged_by_reordered_runs(precision: str, rank_pool: RankPool) -> None:
    report = paceline.verify(
        **subject("gpt"), layouts=["dp=2"], global_batch=6, precision=precision, pool=rank_pool
    )
    assert report.ok, str(report)
    assert report.noise > 1e-8
    assert any("in another order and cut" in note for note in report.notes)


def test_dropout_is_on_unless_it_knows_the_layout(rank_pool: RankPool) -> None:
    """The report says which; with masks of each rank's own no layout could repeat one process."""
    shared = {"layouts": ["dp=2"], "global_batch": 4, "steps": 1, "pool": rank_pool}
    report = paceline.verify(**subject("gpt"), **shared)
    assert report.ok, str(report)
    assert any("do not know the layout: they were on" in note for note in report.notes)
    report = paceline.verify(**subject("gpt"), **shared, randomness="fast")
    assert any(note.startswith("dropout was off in every run") for note in report.notes)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(make_vectors(11))


@pytest.mark.parametrize("kind", ["stream", "dataloader"])
def test_data_like_the_trainers(kind: str, rank_pool: RankPool) -> None:
    """Three steps of 8 from 11 samples: the data starts anew on the way."""
    data = Stream() if kind == "stream" else DataLoader(make_vectors(11), batch_size=8)
    report = paceline.verify(
        make_mlp(),
        optimizer=adamw,
        loss=nn.CrossEntropyLoss(),
        data=data,
        layouts="dp=3",
        global_batch=8 if kind == "stream" else None,
        pool=rank_pool,
    )
    assert report.ok, str(report)
    assert report.global_batch == 8


def test_the_callers_model_and_optimizer_are_left_alone(rank_pool: RankPool) -> None:
    model = make_mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters())
    report = paceline.verify(
        model,
        optimizer=optimizer,
        loss=nn.CrossEntropyLoss(),
        data=make_vectors(12),
        layouts=["dp=2"],
        global_batch=6,
        pool=rank_pool,
    )
    assert report.ok
    assert not optimizer.state
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.dtype == before[name].dtype


def test_frozen_and_unused_parameters(rank_pool: RankPool) -> None:
    model = gpt2()
    model.transformer.wpe.weight.requires_grad_(False)
    model.unused = nn.Linear(2, 2)
    report = paceline.verify(
        model,
        optimizer=adamw,
        data=Encodings(),
        layouts=["dp=2"],
        global_batch=5,
        pool=rank_pool,
    )
    assert report.ok, str(report)


def test_forwards_that_one_process_cannot_run(rank_pool: RankPool) -> None:
    """A batch norm over one sample: told for each layout, and the others go on."""
    report = paceline.verify(
        lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)),
        optimizer=adamw,
        loss=nn.CrossEntropyLoss(),
        data=make_vectors(12),
        layouts=["dp=1,microbatch=1", "dp=1,pp=2,schedule=gpipe,microbatch=1", "dp=2"],
        global_batch=4,
        steps=1,
        sync_batchnorm=True,
        pool=rank_pool,
    )
    assert [row.outcome for row in report.rows] == ["failed", "failed", "same"], str(report)
    assert "one process cannot run the forwards" in report.rows[1].words


class NoFloat64(nn.Linear):
    """Stands for a kernel that was written for narrower numbers alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float64:
            raise RuntimeError("expected float32, got double")
        return super().forward(x)


def test_a_model_without_float64_is_proved_in_float32(rank_pool: RankPool) -> None:
    options: dict[str, Any] = dict(
        optimizer=adamw, loss=nn.CrossEntropyLoss(), data=make_vectors(12), global_batch=4
    )
    model = nn.Sequential(NoFloat64(8, 16), nn.ReLU(), nn.Linear(16, 4))
    report = paceline.verify(model, layouts=["dp=2", "tp=2"], steps=2, pool=rank_pool, **options)
    assert report.ok, str(report)
    assert report.precision == "fp32"
    assert "does not run in float64 (expected float32, got double)" in str(report)
    # What tensor parallelism does with the model is told, too.
    assert "tp=2: tensor parallel: each of 2 ranks holds" in " ".join(str(report).split())
