"""CSV, W&B, Comet and recorders of one's own: what was written, read back."""

from __future__ import annotations

import csv
import json
import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.train_trackers import trackers_of
from paceline.config import load
from paceline.errors import ConfigError, MissingExtra
from paceline.events import Event, RunFailed
from paceline.launch.run_folder import RunFolder
from paceline.track import CSV, Comet, RunRecorder, WandB
from run_events import evaluated, feed, finished, started, steps

SECRET = "a-key-that-nobody-may-see"


def column(path: Path, name: str) -> list[tuple[int, float]]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert all(None not in row and None not in row.values() for row in rows)
    return [(int(row["step"]), float(row[name])) for row in rows if row[name]]


def test_csv_has_every_number_once_through_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.csv"
    feed(CSV(path), started(), *steps(1, 4), evaluated(4, loss=9.0), *steps(5, 5))
    # Killed here, in the middle of a line; resumed from a checkpoint of step 4.
    with path.open("a", encoding="utf-8") as file:
        file.write("6,17000")
    feed(
        CSV(path),
        started(first=4),
        *steps(5, 5, scale=10.0),
        started(first=4),  # a rank failed, all were started again
        *steps(5, 6, scale=100.0),
        evaluated(6, loss=math.nan, accuracy=0.5),
        finished(),
    )
    assert column(path, "train/loss") == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 500), (6, 600)]
    assert column(path, "validation/accuracy") == [(6, 0.5)]
    (at, before), (_, after) = column(path, "validation/loss")
    assert (at, before) == (4, 9.0)
    assert math.isnan(after)
    header = path.read_text().partition("\n")[0]
    assert header.startswith(
        "step,time,train/loss,train/lr,train/grad_norm,train/samples_per_second,validation/"
    )


class Heard(RunRecorder):
    name = "Heard"

    def __init__(self, run_dir: Path | None = None, word: str = "") -> None:
        super().__init__()
        self.run_dir, self.word, self.heard = run_dir, word, list[Any]()

    def begin(self, facts: Mapping[str, Any], first_step: int) -> None:
        self.heard.append((facts.get("layout"), first_step))

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self.heard.append((step, values["train/loss"]))

    def end(self, how: str) -> None:
        self.heard.append(how)


@pytest.mark.parametrize(
    ("last", "how"),
    [
        ([finished()], "finished"),
        ([finished("interrupted")], "interrupted"),
        ([RunFailed(error="x", rank=0, exit_code=1)], "failed"),
        ([], "interrupted"),
    ],
)
def test_a_recorder_of_ones_own_is_three_methods(last: list[Event], how: str) -> None:
    mine = Heard()
    feed(mine, started(first=2), *steps(3, 4), *last)
    assert mine.heard == [("dp=2", 2), (3, 3.0), (4, 4.0), how]
    late = Heard()
    feed(late, *steps(7, 7))
    assert late.heard == [(None, 6), (7, 7.0), "interrupted"]
    unused = Heard()
    feed(unused, finished())
    assert unused.heard == []


def test_a_config_names_trackers(tmp_path: Path) -> None:
    own = {"target": f"{__name__}:Heard", "args": {"word": "hello"}}
    track = {"progress": False, "csv": True, "trackers": [own, f"{__name__}:Heard"]}
    config = load({"track": track, "tags": ["a", "b"]})
    table, first, second = trackers_of(config, RunFolder(tmp_path))
    assert isinstance(table, CSV)
    assert table.path == tmp_path / "metrics.csv"
    assert (first.run_dir, first.word) == (tmp_path, "hello")  # type: ignore[attr-defined]
    assert second.word == ""  # type: ignore[attr-defined]
    broken = load({"track": {"progress": False, "trackers": ["builtins:dict"]}})
    with pytest.raises(ConfigError, match=r"trackers\.0\.target 'builtins:dict' made a dict"):
        trackers_of(broken, RunFolder(tmp_path))


@pytest.mark.parametrize(("tracker", "extra"), [(WandB, "wandb"), (Comet, "comet")])
def test_a_missing_extra_is_named(
    tracker: Any, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=rf"paceline\[{extra}\]"):
        tracker()


def assert_no_secret(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            assert SECRET.encode() not in file.read_bytes(), file


def records_in(log: Path) -> Iterator[bytes]:
    """The records of an offline run of W&B: a log as LevelDB writes it, after seven bytes."""
    data, at, record = log.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


PARAMS = {"optimizer.lr": 0.1, "model.args.api_key": SECRET}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_wandb_offline_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    options: Any = dict(mode="offline", run_dir=tmp_path, run_name="mine", params=PARAMS)
    feed(WandB(**options, tags=["first"]), started(), *steps(1, 3), evaluated(3, loss=9.0))
    feed(WandB(**options), started(first=2), *steps(3, 4, scale=10.0), finished())
    wandb.teardown()  # the process that W&B keeps beside this one
    logs = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"), key=os.path.getmtime)
    assert len(logs) == 2
    told: list[dict[str, Any]] = []
    ids, names, settings = set(), set(), {}
    for log in logs:
        for data in records_in(log):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                items = record.history.item
                told.append(
                    {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}
                )
            if record.HasField("run"):
                ids.add(record.run.run_id)
                names.add(record.run.display_name)
                settings |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
    assert [(row["_step"], row["train/loss"]) for row in told] == [
        (1, 1), (2, 2), (3, 3), (3, 30), (4, 40)
    ]  # fmt: skip
    assert told[2]["validation/loss"] == 9.0
    assert ids == {json.loads((tmp_path / "wandb.json").read_text())["id"]}
    assert names == {"mine"}
    assert settings["optimizer.lr"] == 0.1
    assert_no_secret(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_comet_offline_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMET_API_KEY", SECRET)
    options: Any = dict(mode="offline", run_dir=tmp_path, run_name="mine", params=PARAMS)
    feed(Comet(**options, tags=["first"]), started(), *steps(1, 2), evaluated(2, loss=9.0))
    feed(Comet(**options), started(first=2), *steps(3, 3), finished())
    archives = sorted(tmp_path.glob("comet/*.zip"), key=os.path.getmtime)
    assert len(archives) == 2
    told: list[Any] = []
    for archive in archives:
        with zipfile.ZipFile(archive) as opened:
            assert SECRET.encode() not in b"".join(map(opened.read, opened.namelist()))
            told += [json.loads(line) for line in opened.read("messages.json").splitlines()]
    values = [one["payload"]["metric"] for one in told if one["type"] == "metric_msg"]
    losses = [(v["step"], v["metricValue"]) for v in values if v["metricName"] == "train/loss"]
    assert losses == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert_no_secret(tmp_path)
