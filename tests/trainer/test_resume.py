"""Going on with a run when something is not as it was: files, callbacks, settings, folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

import paceline
from paceline import events
from paceline.errors import CheckpointError, RankFailed, TrainingError
from paceline.testing.faults import FaultPlan, kill_at


def dataset(n: int = 24) -> TensorDataset:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(n, 4, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())


def trainer(run_dir: Path | str | None = None, **options: Any) -> paceline.Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return paceline.Trainer(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        run_dir=run_dir,
        progress=False,
        **{"loss": F.cross_entropy, "global_batch": 4, **options},
    )


def files(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))


def damage(run_dir: Path, step: int) -> None:
    [data] = (run_dir / "checkpoints" / f"step-{step:09d}").glob("*.bin")
    data.write_bytes(b"damaged")


def test_epochs_are_counted_in_samples_when_the_batch_size_changes(tmp_path: Path) -> None:
    trainer(tmp_path).fit(dataset(), epochs=1)  # six steps of four
    history = trainer(tmp_path, global_batch=12).fit(dataset(), epochs=2, resume=True)
    assert [step.samples for step in history.steps] == [4] * 6 + [12] * 2


def test_run_whose_checkpoints_are_all_damaged_is_not_begun_again(tmp_path: Path) -> None:
    trainer(tmp_path, checkpoint=paceline.Checkpointing(every=2)).fit(dataset(), steps=4)
    damage(tmp_path, 2)
    damage(tmp_path, 4)
    with (
        pytest.warns(UserWarning, match=r"rank-00000-\w+\.bin.* 7") as told,
        pytest.raises(CheckpointError, match="There is nothing older to go on from"),
    ):
        trainer(tmp_path).fit(dataset(), steps=6, resume=True)
    assert len(told) == 2
    assert files(tmp_path) == ["step-000000002", "step-000000004"]
    tried = [(e.step, e.ok) for e in events.read(tmp_path) if isinstance(e, events.RestoreTried)]
    assert tried == [(4, False), (2, False)]


def test_damaged_checkpoint_does_not_push_out_a_new_one(tmp_path: Path) -> None:
    trainer(tmp_path, checkpoint=paceline.Checkpointing(every=2)).fit(dataset(), steps=4)
    damage(tmp_path, 4)
    keep_one = paceline.Checkpointing(every=1, keep=1)
    with pytest.warns(UserWarning, match="step-000000004"):
        trainer(tmp_path, checkpoint=keep_one).fit(dataset(), steps=3, resume=True)
    assert files(tmp_path) == ["step-000000003", "step-000000004"]


def test_checkpoints_of_an_earlier_version_are_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    torch.save({"format": 1}, tmp_path / "checkpoints" / "step-000000003.pt")
    with pytest.raises(CheckpointError, match=r"step-000000003\.pt, written by Paceline 0\.1"):
        trainer(tmp_path).fit(dataset(), steps=4, resume=True)


class Remembers(paceline.Callback):
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.filterwarnings("ignore:step 4. NOT saved")
def test_state_that_could_not_be_loaded_is_refused_when_saved(tmp_path: Path) -> None:
    trainer(tmp_path).fit(dataset(), steps=2)
    with pytest.raises(CheckpointError, match=r"numpy\..*could not be loaded without executing"):
        trainer(tmp_path, callbacks=[Remembers(np.float64(1))]).fit(dataset(), steps=4, resume=True)
    assert files(tmp_path) == ["step-000000002"]


def test_callbacks_find_their_state_by_their_kind(tmp_path: Path) -> None:
    stopping = paceline.EarlyStopping()
    saved = [Remembers(1), stopping, Remembers(2)]
    trainer(tmp_path, callbacks=saved).fit(dataset(), dataset(), steps=2)
    found = [paceline.Callback(), Remembers(0), Remembers(0), Remembers(9)]
    trainer(tmp_path, callbacks=found).fit(dataset(), dataset(), steps=3, resume=True)
    assert [callback.value for callback in found[1:]] == [1, 2, 9]
    notes = [event.message for event in events.read(tmp_path) if isinstance(event, events.Note)]
    assert notes == [
        "the checkpoint holds the state of callbacks that this run does not have: EarlyStopping"
    ]


def test_run_stays_in_its_folder_when_the_program_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Moves(paceline.Callback):
        def on_step_end(self, trainer: Any, result: Any) -> None:
            os.chdir("/")

    monkeypatch.chdir(tmp_path)
    trainer("run", callbacks=[Moves()]).fit(dataset(), steps=2)
    assert files(tmp_path / "run") == ["step-000000002"]


def padded(rows: list[Any]) -> Any:
    x, y = zip(*rows, strict=True)
    return pad_sequence(list(x), batch_first=True), pad_sequence(list(y), batch_first=True)


def _whole_set_of_ragged_batches() -> Any:
    rows = [(torch.ones(1 + i, 4), torch.zeros(1 + i).long()) for i in range(4)]
    return trainer(
        global_batch=2,
        loss=lambda out, target: F.cross_entropy(out.transpose(1, 2), target),
        data=paceline.DataOptions(collate_fn=padded),
        metrics={"whole": paceline.WholeSet(lambda out, target: 0.0)},
    ).fit(rows, rows, steps=1)


WRONG = {
    "callback class": (lambda: trainer(callbacks=[paceline.EarlyStopping]),
        "must be a list of paceline.Callback objects, such as [paceline.EarlyStopping()]."),
    "one callback": (lambda: trainer(callbacks=paceline.EarlyStopping()),
        "must be a list of paceline.Callback objects, such as [paceline.EarlyStopping()]."),
    "metrics": (lambda: trainer(metrics=[print]),
        "metrics must be a dict from name to function, not a list."),
    "metric": (lambda: trainer(metrics={"m": 3}), "metrics: 'm' must be a function, not 3."),
    "section": (lambda: trainer(data={"workers": 2}),
        "data={'workers': 2} must be made with paceline.DataOptions(…)."),
    "option": (lambda: trainer(lr=3),
        "Trainer got an unknown argument lr. The learning rate is the optimizer's: "
        "optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4)."),
    "early stopping": (
        lambda: trainer(callbacks=[paceline.EarlyStopping()]).fit(dataset(), steps=1),
        "EarlyStopping needs validation data: pass val to fit()."),
    "metric gives nothing": (
        lambda: trainer(metrics={"m": lambda o, t: None}).fit(dataset(), dataset(), steps=1),
        "metric 'm' returned NoneType, not one number."),
    "metric gives three": (
        lambda: trainer(metrics={"m": lambda o, t: (1, 2, 3)}).fit(dataset(), dataset(), steps=1),
        "metric 'm' returned tuple, not one number."),
    "run_dir": (lambda: trainer(__file__).fit(dataset(), steps=1), "is a file. Choose a folder."),
    "below a file": (lambda: trainer(f"{__file__}/run").fit(dataset(), steps=1),
        "is a file. Choose a folder."),
    "whole set": (_whole_set_of_ragged_batches,
        "WholeSet (whole) puts the outputs of all batches into one tensor, but their shapes differ"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refused_with_a_reason(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(TrainingError) as caught:
        call()
    assert message in str(caught.value)


def test_metric_of_a_batch_of_padding_gets_the_models_output() -> None:
    class OwnLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            out = self.inner(x)
            return {"loss": F.cross_entropy(out, labels), "logits": out}

    rows = [{"x": torch.ones(4), "labels": -100 if i < 2 else 1} for i in range(4)]
    run = paceline.Trainer(
        OwnLoss(),
        optimizer=torch.optim.SGD,
        global_batch=2,
        count=lambda batch: int((batch["labels"] != -100).sum()),
        metrics={"shape": lambda out, batch: float(out["logits"].shape[1])},
        data=paceline.DataOptions(shuffle=False),
        progress=False,
    )
    metrics = run.fit(rows[2:], rows, steps=1).evals[-1].metrics
    assert metrics["shape"] == 2
    assert metrics["loss"] == metrics["loss"]  # not NaN: the padding counts for nothing


class DiesOnce(paceline.Callback):
    """Kills rank 1 after step 5, in its first life."""

    def on_step_end(self, trainer: paceline.Trainer, result: Any) -> None:
        FaultPlan(kill_at(rank=1, step=5)).reach(result.step)


def test_own_ranks_that_die_are_started_again(tmp_path: Path) -> None:
    options = dict(checkpoint=paceline.Checkpointing(every=2), seed=3)
    undisturbed = trainer(tmp_path / "a", **options)
    undisturbed.fit(dataset(), steps=9, nproc=2)
    killed = trainer(tmp_path / "b", callbacks=[DiesOnce()], **options)
    history = killed.fit(dataset(), steps=9, nproc=2)
    assert history.reason == "done"
    assert [step.step for step in history.steps] == list(range(1, 10))
    for a, b in zip(undisturbed.model.parameters(), killed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_own_ranks_without_a_folder_are_not_begun_again() -> None:
    with pytest.raises(RankFailed, match="killed by SIGKILL"):
        trainer(callbacks=[DiesOnce()]).fit(dataset(), steps=9, nproc=2)
