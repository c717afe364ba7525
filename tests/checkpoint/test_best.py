"""The best checkpoint: by the metric and in the direction that the run was told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoint.plain_checkpoints import put_manifest
from paceline.checkpoint.best import best_info
from paceline.checkpoint.folder import Folder
from paceline.checkpoint.locate import find_checkpoint
from paceline.checkpoint.manifest import Manifest, name_of
from paceline.errors import CheckpointError

VALUES = {1: 0.3, 2: 0.9, 3: 0.5}


def run(where: Path, info: dict[str, Any], metric: str = "accuracy") -> Folder:
    folder = Folder(where)
    for step, value in VALUES.items():
        folder.storage.make_folder(name_of(step))
        put_manifest(folder, step, Manifest(step, {"metrics": {metric: value}, **info}))
    return folder


def step_of_best(folder: Folder, *args: Any) -> int:
    found = folder.best(*args)
    assert found is not None
    return found.step


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 1)])
def test_direction_and_metric_are_those_it_was_saved_with(
    tmp_path: Path, mode: Any, best: int
) -> None:
    folder = run(tmp_path, best_info("accuracy", mode))
    assert step_of_best(folder) == step_of_best(folder, "accuracy") == best
    assert step_of_best(folder, "accuracy", "max") == 2
    assert step_of_best(folder, "accuracy", "min") == 1
    assert find_checkpoint(tmp_path, "best").step == best
    assert find_checkpoint(tmp_path, "best", mode="max").step == 2
    assert find_checkpoint(tmp_path, "last").step == find_checkpoint(tmp_path).step == 3
    assert find_checkpoint(tmp_path, 2).step == 2


def test_what_the_run_was_not_told_is_not_guessed(tmp_path: Path) -> None:
    folder = run(tmp_path, {})
    with pytest.raises(CheckpointError, match=r"not told whether a small or a large 'accuracy'"):
        folder.best("accuracy")
    with pytest.raises(CheckpointError, match=r"not told by which metric .*\(accuracy\)"):
        folder.best()
    assert step_of_best(folder, "accuracy", "max") == 2
    assert folder.best("other") is None
    with pytest.raises(CheckpointError, match="it is 'min' or 'max'"):
        folder.best("accuracy", "up")  # type: ignore[arg-type]
    assert Folder(tmp_path / "none").best() is None


def test_less_loss_is_better(tmp_path: Path) -> None:
    assert step_of_best(run(tmp_path, {}, "val_loss"), "val_loss") == 1


@pytest.mark.parametrize(
    "info", [{"best": 5}, {"best": {}}, {"best": {"metric": 3, "mode": "max"}}, {"metrics": 3}]
)
def test_a_record_that_makes_no_sense_counts_for_nothing(
    tmp_path: Path, info: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError, match="not told by which metric"):
        run(tmp_path, info).best()


def test_the_newest_record_counts(tmp_path: Path) -> None:
    folder = run(tmp_path, best_info("accuracy", "min"))
    info = {"metrics": {"accuracy": 0.4}, **best_info("accuracy", "max")}
    folder.storage.make_folder(name_of(4))
    put_manifest(folder, 4, Manifest(4, info))
    assert step_of_best(folder) == 2
    (tmp_path / name_of(2) / "manifest.json").write_bytes(b"damaged")
    assert step_of_best(folder) == 3


@pytest.mark.parametrize("which", ["newest", -1, True, 1.5, [3]])
def test_questions_that_make_no_sense(tmp_path: Path, which: Any) -> None:
    run(tmp_path, {})
    with pytest.raises(CheckpointError, match="it is 'best', 'last' or the number of a step"):
        find_checkpoint(tmp_path, which)
    with pytest.raises(CheckpointError, match="ask for the best"):
        find_checkpoint(tmp_path, 3, metric="accuracy")
    with pytest.raises(CheckpointError, match=r"is one checkpoint: to have the best"):
        find_checkpoint(tmp_path / name_of(3), "best")
    with pytest.raises(CheckpointError, match=r"no checkpoint that was saved with the metric 'x'"):
        find_checkpoint(tmp_path, "best", metric="x")
