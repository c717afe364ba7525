"""The timeline: a trace of phases that Chrome's viewer reads, written by rank 0."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline.compat.horovod.torch as hvd


def record(folder: str) -> None:
    os.environ["HOROVOD_TIMELINE"] = os.path.join(folder, "environment.json")
    hvd.init()
    hvd.allreduce(torch.ones(3), name="first")
    hvd.start_timeline(os.path.join(folder, "called.json"), mark_cycles=True)
    hvd.broadcast(torch.ones(3), 0, name="second")
    hvd.allgather(torch.ones(3), name="third")
    hvd.stop_timeline()
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(3), name="fourth")
    hvd.shutdown()
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.start_timeline(os.path.join(folder, "never.json"))


@pytest.mark.world(2)
def test_phases_of_each_tensor(ranks: Any, tmp_path: Path) -> None:
    ranks.run(record, str(tmp_path), join=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["called.json", "environment.json"]
    first = json.loads((tmp_path / "environment.json").read_text())
    assert "start_time_since_epoch_in_micros" in first[0]["args"]
    names = {e["args"]["name"]: e["pid"] for e in first if e["name"] == "process_name"}
    assert list(names) == ["allreduce.first"]
    phases = [(e["ph"], e["name"]) for e in first if e["pid"] == names["allreduce.first"]]
    assert phases[2:] == [
        ("B", "NEGOTIATE_ALLREDUCE"),
        ("E", "NEGOTIATE_ALLREDUCE"),
        ("B", "ALLREDUCE"),
        ("E", "ALLREDUCE"),
    ]
    times = [event["ts"] for event in first if "ts" in event]
    assert times == sorted(times)
    second = json.loads((tmp_path / "called.json").read_text())
    names = {e["args"]["name"] for e in second if e["name"] == "process_name"}
    assert names == {"broadcast.second", "allgather.third"}
    assert sum(event["name"] == "CYCLE_START" for event in second) == 2
