"""Averaged weights of a trainer: measured beside the others, kept by checkpoints, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.checkpoint import export_safetensors, find_checkpoint
from paceline.errors import CheckpointError
from paceline.events import Note, read

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
DATA = TensorDataset(X, (X.sum(1) > 0).long())


def make(run_dir: Path | None = None, *, norm: bool = True, **options: Any) -> paceline.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Tanh(), nn.Linear(8, 2)
    )
    return paceline.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        metrics={"accuracy": lambda output, target: (output.argmax(1) == target).double().mean()},
        global_batch=6,
        precision="fp64",
        run_dir=run_dir,
        progress=False,
        **options,
    )


def test_it_is_measured_kept_and_exported(tmp_path: Path) -> None:
    checkpoint = paceline.Checkpointing(best="ema/loss", keep_best=1, keep=5)
    trainer = make(tmp_path / "run", ema=paceline.EMA(0.8, start=3), checkpoint=checkpoint)
    history = trainer.fit(DATA, DATA, epochs=3)
    measured = history.evals[-1].metrics
    assert measured.keys() == {"loss", "accuracy", "ema/loss", "ema/accuracy"}
    assert measured["ema/loss"] != measured["loss"]

    again = trainer.evaluate(DATA)
    assert again == pytest.approx(measured)
    assert trainer.evaluate(DATA, weights="ema")["loss"] == pytest.approx(measured["ema/loss"])
    assert trainer.evaluate(DATA, weights="model").keys() == {"loss", "accuracy"}
    rows = trainer.predict(X, weights="ema")
    assert not torch.equal(rows, trainer.predict(X))

    # A model that knows nothing of averages, a trainer without one, and other programs.
    plain = make().model.double()
    paceline.load_weights(plain, tmp_path / "run", weights="ema")
    torch.testing.assert_close(plain.eval()(X).detach(), rows)
    other = make(tmp_path / "run")
    found = other.evaluate(DATA, which="last", weights="ema")
    assert found["loss"] == pytest.approx(measured["ema/loss"])
    torch.testing.assert_close(other.predict(X, which="last", weights="ema"), rows)
    kept = find_checkpoint(tmp_path / "run", "last")
    exported = load_file(export_safetensors(kept, tmp_path / "ema.safetensors", weights="ema"))
    assert exported.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(exported[name], value), name


def test_until_it_begins_the_average_is_the_model(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", ema=paceline.EMA(0.8, start=100))
    measured = trainer.fit(DATA, DATA, epochs=1).evals[-1].metrics
    assert measured["ema/loss"] == measured["loss"]
    with pytest.raises(CheckpointError, match="holds no averaged weights"):
        trainer.load_weights("last", weights="ema")
    quiet = make(ema=paceline.EMA(0.8, evaluate=False))
    assert quiet.fit(DATA, DATA, epochs=1).evals[-1].metrics.keys() == {"loss", "accuracy"}


def test_a_resumed_run_is_one_that_never_stopped(tmp_path: Path) -> None:
    whole = make(ema=0.8)
    whole.fit(DATA, DATA, epochs=3)
    make(tmp_path / "run", ema=0.8).fit(DATA, DATA, epochs=1)
    resumed = make(tmp_path / "run", ema=0.8)
    resumed.fit(DATA, DATA, epochs=3, resume=True)
    expected = whole.engine.whole_parameters(weights="ema")
    found = resumed.engine.whole_parameters(weights="ema")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    # Switched on in the middle, it begins with the weights of the checkpoint.
    make(tmp_path / "plain").fit(DATA, epochs=1)
    late = make(tmp_path / "plain", ema=0.8)
    late.fit(DATA, epochs=2, resume=True)
    told = [event.message for event in read(tmp_path / "plain") if isinstance(event, Note)]
    assert any("step 4 has no averaged weights" in message for message in told)


def test_ranks_that_are_brought_up_hand_it_over() -> None:
    alone, many = make(ema=0.8, norm=False), make(ema=0.8, norm=False)
    expected = alone.fit(DATA, DATA, epochs=2).evals[-1].metrics
    found = many.fit(DATA, DATA, epochs=2, nproc=2).evals[-1].metrics
    assert found == pytest.approx(expected, rel=1e-9)
    assert many.evaluate(DATA) == pytest.approx(found)
    assert many.evaluate(DATA, nproc=2) == pytest.approx(found)
