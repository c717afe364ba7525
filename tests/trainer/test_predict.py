"""Predictions and evaluations by themselves: every sample once, in order, on any layout."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline
from paceline.errors import DataError, LossError, TrainingError
from paceline.testing import RankPool

N = 23  # with global batches of 6: three full ones and one of 5, uneven on every world


class Body(nn.Module):
    """Deep enough for two pipeline stages; dropout must be off."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Several(nn.Module):
    """Returns a loss of its own where there are labels, and two kinds of rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        hidden = self.first(x).tanh()
        logits = self.second(hidden)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits, "hidden": hidden}


class Squares(IterableDataset[torch.Tensor]):
    """A stream without a length and without targets."""

    def __iter__(self) -> Any:
        return iter(inputs())


def inputs(n: int = N) -> torch.Tensor:
    return torch.randn(N, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)[:n]


def labelled(n: int = N) -> TensorDataset:
    return TensorDataset(inputs(n), (inputs(n).sum(1) > 0).long())


def trainer(model: nn.Module | None = None, **options: Any) -> paceline.Trainer:
    return paceline.Trainer(
        model if model is not None else Body(),
        **{"loss": nn.CrossEntropyLoss(), "global_batch": 6, "precision": "fp64", **options},
        progress=False,
    )


def predict_every_way(folder: Path, layout: str) -> dict[str, Any]:
    """What the ranks of one layout give, without an optimizer and without targets."""
    found: dict[str, Any] = {}
    run = trainer(layout=layout, microbatch=2)
    found["unlabelled"] = run.predict(inputs())
    found["labelled"] = run.predict(labelled())
    found["stream"] = run.predict(Squares())
    for suffix in ("npy", "npz", "safetensors", "jsonl"):
        out = folder / f"{layout}.{suffix}"
        assert run.predict(TensorDataset(inputs()), out=out) == out
    found["metrics"] = run.evaluate(labelled())
    batches = paceline.loader(inputs(5), global_batch=6, shuffle=False, layout=run.engine.layout)
    own = [run.engine.predict(batch) for batch in batches]
    found["share"] = own, run.engine.coordinate.dp
    return found


LAYOUTS = ["dp=1", "dp=2", "dp=3", "dp=2,zero=3", "tp=2", "pp=2", "tp=2,pp=2"]


@pytest.fixture(scope="module")
def reference() -> torch.Tensor:
    model = Body().double().eval()
    with torch.no_grad():
        return model(inputs())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_rows_in_the_same_order_on_every_layout(
    layout: str, rank_pool: RankPool, tmp_path: Path, reference: torch.Tensor
) -> None:
    size = paceline.Layout.smallest(layout).world_size
    everyone = rank_pool.run(predict_every_way, tmp_path, layout, world_size=size)
    for found in everyone:  # every rank has all rows
        for way in ("unlabelled", "labelled", "stream"):
            torch.testing.assert_close(found[way], reference, rtol=0, atol=1e-9)
    dp = paceline.Layout.smallest(layout).dp
    for found in everyone:
        [rows], slot = found["share"]
        start, end = paceline.data.share(5, slot, dp)
        torch.testing.assert_close(rows, reference[start:end], rtol=0, atol=1e-9)
    loss = nn.functional.cross_entropy(reference, labelled()[:][1])
    assert everyone[0]["metrics"]["loss"] == pytest.approx(float(loss), abs=1e-9)
    as_array = torch.from_numpy(numpy.load(tmp_path / f"{layout}.npy"))
    torch.testing.assert_close(as_array, reference, rtol=0, atol=1e-9)
    with numpy.load(tmp_path / f"{layout}.npz") as archive:
        assert torch.equal(torch.from_numpy(archive["output"]), as_array)
    assert torch.equal(load_file(tmp_path / f"{layout}.safetensors")["output"], as_array)
    lines = (tmp_path / f"{layout}.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["index"] for record in records] == list(range(N))
    assert torch.equal(torch.tensor([r["output"] for r in records], dtype=torch.float64), as_array)
    assert len(os.listdir(tmp_path)) == 4  # nothing unfinished is left


def test_several_outputs_by_name_and_what_is_taken_of_them(tmp_path: Path) -> None:
    run = trainer(Several(), loss=None)
    data = [{"x": row} for row in inputs()]
    rows = run.predict(data)
    assert {name: tuple(t.shape) for name, t in rows.items()} == {
        "logits": (N, 2),
        "hidden": (N, 5),
    }
    with_labels = [{"x": row, "labels": torch.tensor(1)} for row in inputs()]
    assert torch.equal(run.predict(with_labels, take="logits"), rows["logits"])
    classes = run.predict(data, take=lambda output: output["logits"].argmax(-1))
    assert torch.equal(classes, rows["logits"].argmax(-1))
    out = run.predict(data, out=tmp_path / "rows.npz")
    with numpy.load(out) as archive:
        assert sorted(archive) == ["hidden", "logits"]
        assert torch.equal(torch.from_numpy(archive["hidden"]), rows["hidden"])
    saved = load_file(run.predict(data, out=tmp_path / "rows.safetensors"))
    assert torch.equal(saved["logits"], rows["logits"])
    forward = run.predict(inputs(), forward=lambda model, x: model(x)["hidden"].sum(1))
    torch.testing.assert_close(forward, rows["hidden"].sum(1))
    with pytest.raises(TrainingError, match="several tensors \\(logits, hidden\\)"):
        run.predict(data, out=tmp_path / "rows.npy")
    with pytest.raises(TrainingError, match=r"take='score'.*loss, logits, hidden"):
        run.predict(data, take="score")
    with pytest.raises(TrainingError, match="not a tensor with a row for each of the 6 samples"):
        run.predict(data, take=lambda output: output["logits"].T)
    assert sorted(os.listdir(tmp_path)) == ["rows.npz", "rows.safetensors"]


def test_dtypes_and_rows_of_other_shapes(tmp_path: Path) -> None:
    run = trainer()
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8):

        def take(output: torch.Tensor, dtype: torch.dtype = dtype) -> torch.Tensor:
            return (output > 0).to(dtype)

        rows = run.predict(inputs(), take=take)
        path = run.predict(inputs(), out=tmp_path / f"{dtype}.npy", take=take)
        read = torch.from_numpy(numpy.load(path))
        assert torch.equal(read, rows.float() if dtype is torch.bfloat16 else rows)

    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * x[:, : 1 + int(x[0, 0] > 0)] / (x[:, :1] * 0)

    ragged = trainer(Ragged())
    with pytest.raises(TrainingError, match=r"cannot make one array.*\.jsonl"):
        ragged.predict(inputs(), out=tmp_path / "ragged.npy")
    path = ragged.predict(inputs(), out=tmp_path / "ragged.jsonl")
    outputs = [json.loads(line)["output"] for line in path.read_text().splitlines()]
    assert {len(output) for output in outputs} == {1, 2}
    assert {value for output in outputs for value in output} <= {"inf", "-inf", "nan"}


def test_what_is_refused_before_a_batch_is_read(tmp_path: Path) -> None:
    run = trainer()
    (tmp_path / "there.npy").write_text("mine")
    for out, why in {
        "rows.csv": r"one of \.npy, \.npz, \.safetensors, \.jsonl",
        "none/rows.npy": "not a folder",
        "there.npy": "overwrite",
    }.items():
        with pytest.raises(TrainingError, match=why):
            run.predict(inputs(), out=tmp_path / out)
    assert (tmp_path / "there.npy").read_text() == "mine"
    run.predict(inputs(), out=tmp_path / "there.npy", overwrite=True)
    assert numpy.load(tmp_path / "there.npy").shape == (N, 3)
    with pytest.raises(DataError, match="shuffles"):
        run.predict(DataLoader(inputs(), batch_size=6, shuffle=True))
    with pytest.raises(DataError, match="drop_last"):
        run.predict(DataLoader(inputs(), batch_size=6, drop_last=True))
    with pytest.raises(DataError, match=r"predict\(\) got a Tensor: pass global_batch="):
        trainer(global_batch=None).predict(inputs())
    with pytest.raises(TrainingError, match="without an optimizer"):
        run.fit(labelled(), steps=1)
    with pytest.raises(TrainingError, match="without an optimizer"):
        run.engine.step(next(iter(DataLoader(labelled(), batch_size=6))))
    with pytest.raises(TrainingError, match="no run_dir"):
        run.load_weights()


class Interrupting(nn.Module):
    """Presses Ctrl-C, as seen from inside the process, on one rank in its second batch."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer, self.rank, self.calls = nn.Linear(4, 1), rank, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2 and paceline.World.current().rank == self.rank:
            os.kill(os.getpid(), signal.SIGINT)
        return self.layer(x)


def stop_in_the_middle(folder: Path) -> list[str]:
    found = []
    for rank in (0, 1):
        for suffix in ("npy", "npz", "jsonl"):
            try:
                trainer(Interrupting(rank)).predict(inputs(), out=folder / f"{rank}.{suffix}")
            except KeyboardInterrupt as error:
                found.append(str(error))
    return found


def fail_to_write(folder: Path) -> str:
    """The disk fills up on rank 0 in the second batch: both ranks hear of it."""
    from paceline.trainer import prediction_files

    def full(self: Any, rows: Any) -> None:
        if self.rows:
            raise OSError(28, "No space left on device")

    prediction_files._JsonLines._add = full  # type: ignore[method-assign]
    try:
        trainer().predict(inputs(), out=folder / "full.jsonl")
    except TrainingError as error:
        return str(error)
    return ""


@pytest.mark.world(2)
def test_what_is_stopped_leaves_no_file(ranks: Any, tmp_path: Path) -> None:
    for found in ranks(stop_in_the_middle, tmp_path):
        assert len(found) == 6
        assert all("predict was under way" in told for told in found)
    for told in ranks(fail_to_write, tmp_path):
        assert "No space left" in told
        assert "full.jsonl" in told
    assert os.listdir(tmp_path) == []


def evaluate_then_train(layout: str) -> Any:
    """An engine that has only looked goes on to train, as one that has not."""
    losses = []
    for looks in (False, True):
        model = Body()
        run = trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), layout=layout)
        if looks:
            run.predict(inputs())
        losses.append(run.fit(labelled(), steps=3).losses)
        before = run.evaluate(labelled())["loss"]
        again = run.evaluate(labelled(), batches=2)["loss"]
        losses[-1] += [before, again]
    return losses


@pytest.mark.world(2)
def test_looking_changes_nothing(ranks: Any) -> None:
    for layout in ("dp=2", "dp=2,zero=3", "pp=2"):
        plain, looked = ranks(evaluate_then_train, layout)[0]
        assert plain == looked, layout


class Best(paceline.Callback):
    """Remembers the validation losses and predictions."""

    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}

    def on_evaluate(self, trainer: Any, metrics: Any) -> None:
        self.seen[trainer.step] = trainer.predict(inputs(5)), metrics["loss"]


def test_the_best_weights_in_one_line_and_predictions_from_a_callback(tmp_path: Path) -> None:
    model, seen = Body(), Best()
    run = trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=2.0),  # overshoots: the last is not best
        run_dir=tmp_path / "run",
        callbacks=[seen],
        evaluation=paceline.Evaluation(every=1),
        checkpoint=paceline.Checkpointing(best="loss"),
    )
    history = run.fit(labelled(), labelled(9), steps=6)
    best = history.best()
    assert best is not None
    assert best.metrics["loss"] == min(history.metric("loss"))
    assert run.predict(inputs(5), which="best").equal(seen.seen[best.step][0])
    assert run.evaluate(labelled(9), which="last")["loss"] == seen.seen[6][1]
    run.load_weights()
    assert run.evaluate(labelled(9))["loss"] == best.metrics["loss"]
    assert [e.step for e in history.evals] == list(range(1, 7))  # looking is not part of the run


def test_a_trainer_brings_up_ranks_to_predict(tmp_path: Path, reference: torch.Tensor) -> None:
    run = trainer(layout="tp=2")
    path = run.predict(inputs(), out=tmp_path / "rows.npy", nproc=2)
    rows = torch.from_numpy(numpy.load(path))
    torch.testing.assert_close(rows, reference, rtol=0, atol=1e-9)


def test_a_pair_without_a_target_goes_in_whole() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.layer(a - b)

    run = trainer(Two())
    pairs = TensorDataset(inputs(), inputs() / 2)
    three = TensorDataset(inputs(), inputs() / 2, torch.zeros(N))
    assert torch.equal(run.predict(pairs), run.predict(three))
    with pytest.raises(LossError, match="does not take that"):
        run.predict(inputs())
