"""Engines that are saved and restored together: a GAN, killed in the middle of a round."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.checkpoint import export_safetensors, find_checkpoint
from paceline.errors import CheckpointError, RankFailed, TrainingError

ROUNDS = 4


def gan(layout: str) -> tuple[paceline.Engine, paceline.Engine]:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    judge = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def noise(samples: Tensor) -> Tensor:
        return torch.randn(len(samples), 3, dtype=torch.float64)

    def judged(model: nn.Module, batch: Any) -> Tensor:
        (real,) = batch
        with torch.no_grad():
            fake = maker(noise(real))
        return F.softplus(-model(real)).mean() + F.softplus(model(fake)).mean()

    def made(model: nn.Module, batch: Any) -> Tensor:
        return F.softplus(-judge(model(noise(batch[0])))).mean()

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=1e-2)

    discriminator = paceline.Engine(judge, optimizer=adam, forward=judged, layout=layout)
    generator = paceline.Engine(maker, optimizer=adam, forward=made, layout=layout, ema=0.5)
    return generator, discriminator


def train(folder: Path, layout: str, dies: bool = False) -> list[dict[str, Tensor]]:
    """Two steps of the discriminator to each of the generator, saved after each round."""
    generator, discriminator = gan(layout)
    real = torch.randn(24, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loader = paceline.loader(TensorDataset(real), global_batch=6, layout=generator.layout)
    engines = {"generator": generator, "discriminator": discriminator}
    with paceline.Checkpoints(folder, engines, loader=loader) as checkpoints:
        checkpoints.restore()
        while generator.steps_done < ROUNDS:
            for batch in loader:
                discriminator.step(batch)
                if discriminator.steps_done == 6 and dies:
                    os.kill(os.getpid(), signal.SIGKILL)  # between the engines
                if discriminator.steps_done % 2:
                    continue
                generator.step(batch)
                checkpoints.save(wait=True)
                if generator.steps_done == ROUNDS:
                    break
    own = generator.whole_parameters(), generator.whole_parameters("ema")
    return [*own, discriminator.whole_parameters()]


@pytest.mark.world(2)
def test_engines_are_resumed_together_to_the_bit(ranks: Any, tmp_path: Path) -> None:
    alone = train(tmp_path / "alone", "dp=1")
    layout, folder, other = "dp=2,zero=3", tmp_path / "killed", tmp_path / "other"
    expected = ranks(train, tmp_path / "whole", layout)[0]
    with pytest.raises(RankFailed, match="SIGKILL"):
        ranks(train, folder, layout, True)
    shutil.copytree(folder, other)
    found = ranks(train, folder, layout)[1]
    split = ranks(train, other, "tp=2")[1]
    for own, uninterrupted, cut, one in zip(found, expected, split, alone, strict=True):
        for name, value in uninterrupted.items():
            assert torch.equal(own[name], value), name
            torch.testing.assert_close(value, one[name], rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(cut[name], one[name], rtol=1e-9, atol=1e-11)
    assert find_checkpoint(folder).manifest.step == 2 * ROUNDS  # of the one that has done most


def test_each_engine_is_found_by_its_name(tmp_path: Path) -> None:
    found = train(tmp_path / "gan", "dp=1")
    maker, _ = gan("dp=1")
    paceline.load_weights(maker.model, tmp_path / "gan", engine="generator", weights="ema")
    for name, value in maker.model.named_parameters():
        assert torch.equal(value, found[1][name])
    paceline.load_weights(maker, tmp_path / "gan", engine="generator")
    assert torch.equal(maker.whole_parameters()["0.weight"], found[0]["0.weight"])
    kept = find_checkpoint(tmp_path / "gan")
    out = export_safetensors(kept, tmp_path / "d.safetensors", engine="discriminator")
    assert torch.equal(load_file(out)["0.weight"], found[2]["0.weight"])
    with pytest.raises(CheckpointError, match="engines discriminator, generator: give the name"):
        paceline.load_weights(maker.model, tmp_path / "gan")
    with pytest.raises(CheckpointError, match="none of them is 'critic'"):
        paceline.load_weights(maker.model, tmp_path / "gan", engine="critic")


def test_what_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "gan", "dp=1")
    generator, discriminator = gan("dp=1")
    for engines, words in (
        (generator, "to be restored is one engine without a name"),
        ({"generator": generator}, "to be restored is the engine generator"),
    ):
        with (
            paceline.Checkpoints(tmp_path / "gan", engines) as checkpoints,
            pytest.raises(CheckpointError, match=words),
        ):
            checkpoints.restore()
    wrong: Any
    for wrong, words in (
        ({}, "no engine to save"),
        ({"a/b": generator}, "needs a name without a slash"),
        ({"model": generator.model}, "is a Sequential, not a paceline.Engine"),
        ({"one": generator, "two": generator}, "one engine has several names"),
    ):
        with pytest.raises(TrainingError, match=words):
            paceline.Checkpoints(tmp_path / "new", wrong)
    assert discriminator.steps_done == 0
