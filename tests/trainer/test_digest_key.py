"""A run whose checkpoints are written with a key, and which takes no others."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.config import check, load
from paceline.errors import CheckpointError, ConfigError, TrainingError

NAME = "PACELINE_TEST_RUN_KEY"
KEYED = paceline.Checkpointing(digest="blake2b", digest_key=f"env:{NAME}", memory_every=1)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "a key of the run's")


def engine() -> paceline.Engine:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return paceline.Engine(model, loss=nn.MSELoss(), optimizer=optimizer)


def saved(folder: Path, options: paceline.Checkpointing, steps: int = 1) -> torch.Tensor:
    own = engine()
    for _ in range(steps):
        own.step((torch.ones(4, 2), torch.zeros(4, 1)))
    with paceline.Checkpoints(folder, own, options=options) as checkpoints:
        checkpoints.save(wait=True)
        [(outcome, _, _)] = checkpoints.finished()
        assert outcome.error is None
        if options.memory_every:
            checkpoints.snapshot()
    return own.model.weight.detach()


def restored(folder: Path, options: paceline.Checkpointing = KEYED) -> tuple[Any, torch.Tensor]:
    own = engine()
    with paceline.Checkpoints(folder, own, options=options, report=lambda _: None) as checkpoints:
        return checkpoints.restore(), own.model.weight.detach()


def test_what_was_saved_with_the_key_is_restored_with_it(tmp_path: Path) -> None:
    expected = saved(tmp_path, KEYED)
    found, weight = restored(tmp_path)
    assert found is not None
    assert (found.step, torch.equal(weight, expected)) == (1, True)
    head = (tmp_path / "step-000000001" / "manifest.json").read_bytes().partition(b"\n")[0]
    assert "blake2b_keyed" in json.loads(head)


def test_a_planted_checkpoint_is_stepped_over(tmp_path: Path) -> None:
    expected = saved(tmp_path / "run", KEYED, steps=1)
    saved(tmp_path / "planted", paceline.Checkpointing(), steps=2)
    shutil.copytree(tmp_path / "planted" / "step-000000002", tmp_path / "run" / "step-000000002")
    found, weight = restored(tmp_path / "run")
    assert (found.step, torch.equal(weight, expected)) == (1, True)


@pytest.mark.parametrize(
    ("value", "message"),
    [("another key of somebody", "written with another key"), ("", "is empty")],
)
def test_another_key_or_none_resumes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    saved(tmp_path, KEYED)
    monkeypatch.setenv(NAME, value)
    with pytest.raises(CheckpointError, match=message):
        restored(tmp_path)


def test_a_run_without_the_key_says_that_it_takes_one(tmp_path: Path) -> None:
    saved(tmp_path, KEYED)
    with pytest.raises(CheckpointError, match="was written with a key"):
        restored(tmp_path, paceline.Checkpointing())


def test_starting_weights_need_the_key_too(tmp_path: Path) -> None:
    saved(tmp_path, paceline.Checkpointing())
    with pytest.raises(CheckpointError, match="without a key, and a key is required"):
        paceline.load_weights(engine(), tmp_path, key=f"env:{NAME}")


@pytest.mark.world(2)
@pytest.mark.parametrize("own", ["the same for all ranks", "RANK"])
def test_all_ranks_have_the_same_key(ranks: Any, tmp_path: Path, own: str) -> None:
    def job() -> str:
        os.environ[NAME] = own.replace("RANK", "the key of rank " + os.environ["RANK"])
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made = paceline.Engine(model, loss=nn.MSELoss(), optimizer=optimizer, layout="dp=2,zero=3")
        try:
            with paceline.Checkpoints(tmp_path, made, options=KEYED) as checkpoints:
                made.step((torch.ones(2, 2), torch.zeros(2, 1)))
                checkpoints.save(wait=True)
                checkpoints.snapshot()
                found = checkpoints.restore()
                assert found is not None
                return f"step {found.step}"
        except CheckpointError as error:
            return str(error)

    for said in ranks(job):
        assert "not the same key on all ranks" in said if own == "RANK" else said == "step 1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"digest": "md5"}, "digest='md5' must be one of xxh3, blake2b"),
        ({"digest_key": "env:A"}, "digest='xxh3' takes no digest_key"),
        ({"digest": "blake2b", "digest_key": "hunter2"}, "must not stand here"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TrainingError, ConfigError), match=message) as said:
        paceline.Checkpointing(**options)
    assert "hunter2" not in str(said.value)


def test_a_config_names_the_key_and_never_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("checkpoint: {digest: blake2b, digest_key: 'env:SOME_KEY'}\n")
    assert ["SOME_KEY is not set" in str(p) for p in check(load(file), devices=0)] == [True]
    monkeypatch.setenv("SOME_KEY", "a key of some length")
    assert check(load(file), devices=0) == []
    file.write_text("checkpoint: {digest_key: 'env:SOME_KEY'}\n")
    assert any("takes no key" in str(problem) for problem in check(load(file), devices=0))
    file.write_text("checkpoint: {digest: blake2b, digest_key: hunter2}\n")
    with pytest.raises(ConfigError, match="digest_key") as said:
        load(file)
    assert "hunter2" not in str(said.value)
