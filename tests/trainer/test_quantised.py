"""Quantised weights: those of other libraries are refused, integers in buffers train exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import TrainingError
from paceline.testing.plugin import Ranks


class Int8LoRA(nn.Module):
    """The layer of docs/guides/fine-tuning.md."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight * self.scale).t() + self.up(self.down(x))  # type: ignore[operator]


def fit(layout: str, folder: Path, steps: int, *, resume: bool = False) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(Int8LoRA(nn.Linear(4, 8)), nn.ReLU(), Int8LoRA(nn.Linear(8, 1)))
    x = torch.randn(12, 4)
    trainer = paceline.Trainer(
        model,
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        global_batch=4,
        layout=layout,
        run_dir=folder,
        progress=False,
    )
    history = trainer.fit(TensorDataset(x, x.sum(1, keepdim=True)), steps=steps, resume=resume)
    buffers = dict(model.named_buffers())
    assert buffers["0.weight"].dtype == torch.int8
    return history.losses


def on_each_rank(folder: Path) -> dict[str, list[float]]:
    found = {}
    for layout in ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2"):
        whole = fit(layout, folder / f"whole {layout}", 6)
        fit(layout, folder / layout, 3)
        found[layout] = fit(layout, folder / layout, 6, resume=True)
        assert found[layout] == whole, layout
    return found


@pytest.mark.world(2)
def test_integers_in_buffers_train_alike_and_resume_to_the_bit(
    ranks: Ranks, tmp_path: Path
) -> None:
    alone = fit("dp=1", tmp_path / "alone", 6)
    for losses in ranks(on_each_rank, tmp_path)[0].values():
        assert losses == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("library", ["bitsandbytes.nn.modules", "torchao.dtypes"])
def test_weights_of_quantising_libraries_are_refused(library: str) -> None:
    class Params4bit(nn.Parameter):
        pass

    Params4bit.__module__ = library
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    packed: Any = torch.zeros(2, dtype=torch.uint8)
    model[0].weight = Params4bit(packed, requires_grad=False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with pytest.raises(
        TrainingError, match=r"'0\.weight' is a Params4bit of .*: a quantised weight"
    ):
        paceline.Engine(model, loss=nn.functional.mse_loss, optimizer=optimizer)
