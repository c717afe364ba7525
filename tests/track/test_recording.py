"""TensorBoard and MLflow: what was written, read back."""

from __future__ import annotations

import importlib.util
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import MissingExtra, TrainingError
from paceline.events import (
    EpochDone,
    MediaLogged,
    NonFinite,
    Note,
    RunFailed,
    StepDone,
    StepSplit,
    Straggler,
)
from paceline.track import MLflow, TensorBoard
from run_events import evaluated, feed, finished, started, steps

pytestmark = pytest.mark.filterwarnings(
    # Importing the two packages warns of things in them that are theirs to mend.
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)


def board(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar in a TensorBoard folder, as (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: [(e.step, round(e.value, 4)) for e in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_gets_every_number_once(tmp_path: Path) -> None:
    feed(
        TensorBoard(tmp_path),
        Note(message="before the start"),
        started(),
        *steps(1, 4),
        NonFinite(step=4, what="loss", ranks=[0], action="skip"),
        evaluated(4, loss=9.0, accuracy=0.5),
        # Killed here, resumed from a checkpoint of step 2 with another optimizer.
    )
    feed(
        TensorBoard(tmp_path),
        started(first=2),
        *steps(3, 5, scale=10.0),
        # A rank fails, all are started again from step 4.
        started(first=4),
        *steps(5, 6, scale=100.0),
        evaluated(6, loss=7.0),
        EpochDone(step=6, epoch=0, loss=3.5, samples=48, seconds=3.0),
        finished(),
    )
    found = board(tmp_path)
    assert found["train/loss"] == [(1, 1), (2, 2), (3, 30), (4, 40), (5, 500), (6, 600)]
    assert found["train/lr"] == [(i, 0.1) for i in range(1, 7)]
    assert found["train/grad_norm"] == [(i, i / 2) for i in range(1, 7)]
    assert found["train/samples_per_second"] == [(i, 16) for i in range(1, 7)]
    assert found["validation/loss"] == [(6, 7)]
    assert found["epoch/loss"] == [(6, 3.5)]


def test_where_the_time_went_and_who_is_slow_are_curves(tmp_path: Path) -> None:
    feed(
        TensorBoard(tmp_path),
        started(),
        *steps(1, 4),
        StepSplit(
            step=4,
            steps=4,
            phases={"data": [0.1, 0.3], "waiting": [0.2, 0.0]},
            gpu_utilisation=[0.9, 0.7],
        ),
        Straggler(step=4, rank=1, host="beta", phase="data", factor=2.0, costs=0.2, share=0.4),
    )
    found = board(tmp_path)
    assert found["split/data"] == [(4, 0.2)]
    assert found["split_slowest/data"] == [(4, 0.3)]
    assert found["split/waiting"] == [(4, 0.1)]
    assert found["gpu/utilisation"] == [(4, pytest.approx(0.8))]
    assert found["split/speedup"] == [(4, 1.3333)]  # a third of two ranks waits
    assert found["straggler/seconds"] == [(4, 0.2)]
    assert found["straggler/rank"] == [(4, 1)]


def test_tensorboard_makes_nothing_before_there_is_something(tmp_path: Path) -> None:
    feed(TensorBoard(tmp_path / "never"))
    feed(TensorBoard(tmp_path / "never"), Note(message="hello"))
    assert not (tmp_path / "never").exists()


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    recorder = TensorBoard(tmp_path / "file" / "below")
    troubles: list[str] = []
    recorder.on_trouble = troubles.append
    for event in [started(), *steps(1, 5)]:
        recorder.handle(event)
    recorder.close()
    assert len(troubles) == 1
    assert troubles[0].startswith("TensorBoard stopped recording (")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """One MLflow store for all tests: making its tables takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
        yield uri, MlflowClient(tracking_uri=uri)


def history(client: Any, run_id: str, key: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in client.get_metric_history(run_id, key)]


def test_mlflow_gets_every_number_once_in_one_run(
    tmp_path: Path, store: tuple[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    uri, client = store

    def tracker() -> MLflow:
        return MLflow(
            uri=uri,
            experiment="once",
            run_name="demo",
            run_dir=tmp_path,
            params={"optimizer.lr": 0.1, "long": "x" * 10_000, **{f"p{i}": i for i in range(150)}},
        )

    feed(tracker(), started(), *steps(1, 4), finished("interrupted"))
    experiment = client.get_experiment_by_name("once")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "KILLED"
    feed(
        tracker(),
        started(first=2),
        *steps(3, 6),
        evaluated(6, loss=7.0),
        StepDone(step=7, epoch=0, loss=math.nan, lr=0.1, samples=8, seconds=0.5),
        finished(),
    )
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("demo", "FINISHED")
    assert history(client, run.info.run_id, "train/loss")[:6] == [(i, i) for i in range(1, 7)]
    last_step, last_loss = history(client, run.info.run_id, "train/loss")[6]
    assert last_step == 7
    assert math.isnan(last_loss)
    assert history(client, run.info.run_id, "validation/loss") == [(6, 7)]
    assert run.data.params["optimizer.lr"] == "0.1"
    assert run.data.params["run.layout"] == "dp=2"
    assert run.data.params["p149"] == "149"
    shown = capfd.readouterr()
    assert "INFO" not in shown.out + shown.err, "nothing is written across the progress bar"


def test_mlflow_joins_the_run_that_is_active(tmp_path: Path, store: tuple[str, Any]) -> None:
    import mlflow

    uri, client = store
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    try:
        with pytest.raises(TrainingError, match=r"no run is active. Make the tracker after"):
            MLflow(join=True)
        with mlflow.start_run(run_name="mine") as active:
            with pytest.raises(TrainingError, match="Leave uri and run_name out"):
                MLflow(join=True, uri=uri)
            feed(MLflow(join=True, run_dir=tmp_path), started(), *steps(1, 4), finished())
            run = client.get_run(active.info.run_id)
            assert run.info.status == "RUNNING"  # whoever began it ends it
            assert history(client, run.info.run_id, "train/loss") == [(i, i) for i in range(1, 5)]
            assert run.data.params["run.layout"] == "dp=2"
    finally:
        mlflow.set_tracking_uri(before)
    assert not (tmp_path / "mlflow.json").exists()


def test_mlflow_has_images_histograms_and_texts_as_artifacts(
    tmp_path: Path, store: tuple[str, Any]
) -> None:
    uri, client = store
    told = []
    for what in ("image", "histogram", "text"):
        (tmp_path / what).write_text(what)
        told.append(MediaLogged(step=1, name="a/b", what=what, file=str(tmp_path / what)))
    feed(MLflow(uri=uri, experiment="media", run_dir=tmp_path), started(), *steps(1, 1), *told)
    run_id = json.loads((tmp_path / "mlflow.json").read_text())["run_id"]
    for what in ("image", "histogram", "text"):
        assert [file.path for file in client.list_artifacts(run_id, f"{what}s")] == [
            f"{what}s/{what}"
        ]


def test_mlflow_is_shown_no_credential(store: tuple[str, Any], tmp_path: Path) -> None:
    uri, client = store
    params = {
        "checkpoint.storage.key": "hunter2",
        "checkpoint.storage.client_kwargs.secret": "env:STORE_SECRET",
        "data.args.where": "ftp://me:hunter2@host/x",
        "data.args.options": {"password": "hunter2"},
        "model.args.pad_token": "<pad>",
    }
    feed(
        MLflow(uri=uri, experiment="masked", run_dir=tmp_path, params=params),
        started(),
        finished(),
    )
    (run,) = client.search_runs([client.get_experiment_by_name("masked").experiment_id])
    assert {key: run.data.params[key] for key in params} == {
        "checkpoint.storage.key": "***",
        "checkpoint.storage.client_kwargs.secret": "env:STORE_SECRET",
        "data.args.where": "ftp://me:***@host/x",
        "data.args.options": "{'password': '***'}",
        "model.args.pad_token": "<pad>",
    }
    assert (tmp_path / "mlflow.json").stat().st_mode & 0o077 == 0


def test_mlflow_knows_a_failed_run_and_keeps_runs_apart(
    tmp_path: Path, store: tuple[str, Any]
) -> None:
    uri, client = store
    failed = RunFailed(rank=1, error="ValueError: x", exit_code=1)
    feed(MLflow(uri=uri, experiment="apart", run_dir=tmp_path / "a"), started(), failed)
    feed(MLflow(uri=uri, experiment="apart", run_dir=tmp_path / "b"), started(), *steps(1, 2))
    experiment = client.get_experiment_by_name("apart")
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.info.status for run in runs) == ["FAILED", "KILLED"]


def test_mlflow_without_its_server_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    recorder = MLflow(uri=f"sqlite:///{tmp_path}/file/mlflow.db", run_dir=tmp_path)
    troubles: list[str] = []
    recorder.on_trouble = troubles.append
    for event in [started(), *steps(1, 3)]:
        recorder.handle(event)
    recorder.close()
    assert len(troubles) == 1
    assert troubles[0].startswith("MLflow stopped recording (")


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra) as caught:
        TensorBoard("anywhere")
    assert str(caught.value) == (
        "TensorBoard is not installed. Install it with: pip install 'paceline[tensorboard]'"
    )
    with pytest.raises(MissingExtra, match=r"pip install 'paceline\[mlflow\]'"):
        MLflow()
