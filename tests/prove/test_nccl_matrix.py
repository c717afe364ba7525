"""The benchmark of layouts over NCCL, on CPU ranks: nothing is lost where a case breaks its world."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import LayoutError, RankFailed
from paceline.testing import RankPool

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from nccl.faults import KINDS
from nccl.features import FEATURES
from nccl.worlds import Task, run_all


def _good() -> int:
    return os.getpid()


def _hang() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


def _refuse() -> None:
    raise LayoutError("it does not divide.")


def _raise() -> None:
    if dist.get_rank() == 1:
        raise ValueError("odd")


def test_cases_of_one_size_share_a_world_and_outlive_the_bad_ones(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    functions = {"one": _good, "two": _good, "refused": _refuse, "three": _good}
    functions |= {"hangs": _hang, "four": _good, "raises": _raise, "five": _good}  # type: ignore[dict-item]
    found: dict[str, list[Any] | RankFailed] = {}
    rank_pool.run(int, world_size=2)  # it is up
    run_all(
        {name: Task(2, function) for name, function in functions.items()},
        rank_pool,
        tmp_path,
        device="cpu",
        gpus=0,
        limit=3.0,
        deadline=time.monotonic() + 300,
        done=lambda name, result, seconds: found.update({name: result}),
    )
    assert list(found) == list(functions)
    assert found["one"] == found["two"] == found["three"]  # the same processes
    assert isinstance(found["refused"], RankFailed)
    assert isinstance(found["refused"].__cause__, LayoutError)
    assert "in _hang" in str(found["hangs"]), "with the stack of its ranks"
    assert "rank 1 was here" in str(found["hangs"])
    assert found["four"] != found["one"]
    assert "ValueError: odd" in str(found["raises"])
    assert isinstance(found["five"], list)


def test_the_features_and_faults_are_what_the_page_says() -> None:
    titles = [str(feature) for feature in FEATURES]
    assert len(set(titles)) == len(titles) >= 30
    assert len(KINDS) == 6
