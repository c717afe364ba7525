"""How many samples a trainer's step takes, however that is said, and by whom the data was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import events
from paceline.errors import DataError

N = 24


def dataset() -> TensorDataset:
    x = torch.randn(N, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())


def trainer(**options: Any) -> paceline.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    return paceline.Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        precision="fp64",
        progress=False,
        **options,
    )


def fit(data: Any, **options: Any) -> tuple[list[float], int | None]:
    made = trainer(**options)
    history = made.fit(data, dataset() if options.get("global_batch") else None, epochs=2)
    return history.losses, made.engine.options["microbatch"]


@pytest.mark.world(2)
def test_a_trainer_takes_every_way_to_say_it(ranks: Any) -> None:
    ready = paceline.loader(dataset(), global_batch=8)
    assert len(ready) == 3  # it has been in this process's world of one

    def job() -> Any:
        return [
            fit(dataset(), global_batch=8, microbatch=2),
            fit(dataset(), per_device_batch=2, accumulate=2),
            fit(dataset(), microbatch=2, accumulate=2),
            fit(dataset(), global_batch=8, accumulate=2),
            fit(
                DataLoader(dataset(), batch_size=2, shuffle=True), per_device_batch=2, accumulate=2
            ),
            fit(DataLoader(dataset(), batch_size=8, shuffle=True), accumulate=2),
            fit(ready),
            fit(paceline.loader(dataset(), per_device_batch=2, accumulate=2)),
        ]

    expected, _ = fit(dataset(), global_batch=8)
    for found in ranks(job):
        for losses, _ in found:
            assert losses == pytest.approx(expected, rel=1e-9)
        assert [micro for _, micro in found] == [2, 2, 2, 2, 2, 2, None, 2]


@pytest.mark.world(2)
def test_a_dataloader_is_said_to_be_global(ranks: Any, tmp_path: Path) -> None:
    def job() -> None:
        data = DataLoader(dataset(), batch_size=8)
        trainer(run_dir=tmp_path / "run").fit(data, data, epochs=1)

    ranks(job)
    notes = [e.message for e in events.read(tmp_path / "run") if isinstance(e, events.Note)]
    [told] = [message for message in notes if "batch_size=8" in message]
    assert "4 samples on each of 2 data-parallel ranks" in told


def test_a_run_keeps_the_batch_it_began_with(ranks: Any, tmp_path: Path) -> None:
    def job(epochs: int, resume: bool) -> Any:
        made = trainer(per_device_batch=2, accumulate=2, run_dir=tmp_path / "run")
        history = made.fit(dataset(), epochs=epochs, resume=resume)
        return [step.samples for step in history.steps], made.engine.options["microbatch"]

    def straight() -> Any:
        return trainer(global_batch=8).fit(dataset(), epochs=2).losses

    for samples, _ in ranks(job, 1, False, world_size=2):
        assert samples == [8] * 3
    for samples, micro in ranks(job, 2, True, world_size=3):  # which would make 12
        assert samples == [8] * 6
        assert micro == 2
    started = [e for e in events.read(tmp_path / "run") if isinstance(e, events.RunStarted)]
    assert [(e.global_batch, e.total_steps) for e in started] == [(8, 3), (8, 6)]
    assert paceline.History.read(tmp_path / "run").losses == pytest.approx(straight(), rel=1e-9)


def test_contradictions() -> None:
    loader = paceline.loader(dataset(), global_batch=8)
    with pytest.raises(DataError, match=r"the Loader has its own batch"):
        trainer(per_device_batch=2).fit(loader, epochs=1)
    with pytest.raises(DataError, match=r"per_device_batch=2 and microbatch=4 both say"):
        trainer(per_device_batch=2, microbatch=4).fit(dataset(), epochs=1)
    with pytest.raises(DataError, match=r"per_device_batch=2 does not agree with .*batch_size=8"):
        trainer(per_device_batch=2).fit(DataLoader(dataset(), batch_size=8), epochs=1)
    with pytest.raises(DataError, match=r"global_batch=6 is not a multiple of per_device_batch=4"):
        trainer(global_batch=6, per_device_batch=4).fit(dataset(), epochs=1)
    with pytest.raises(DataError, match=r"pass global_batch= to the Trainer.*per_device_batch="):
        trainer().fit(dataset(), epochs=1)


def test_contradictions_are_found_before_any_rank_is_started() -> None:
    # From a rank they would come as RankFailed.
    with pytest.raises(DataError, match=r"=7 × 2 data-parallel ranks = 14"):
        trainer(global_batch=30, per_device_batch=7).fit(dataset(), epochs=1, nproc=2)
    for data, val in [(dataset(), None), (DataLoader(dataset(), batch_size=8), dataset())]:
        with pytest.raises(DataError, match=r"pass global_batch= to the Trainer"):
            trainer().fit(data, val, epochs=1, nproc=2)
