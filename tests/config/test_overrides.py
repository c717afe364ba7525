"""``--set key=value``: what it does when all is well (wrong ones are in wrong_configs.txt)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config import Config, load, load_checked
from paceline.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("train.steps=100", "train.steps", 100),
        ("train.clip_norm=null", "train.clip_norm", None),
        ("optimizer.lr=3e-4", "optimizer.lr", 3e-4),
        ("optimizer.lr=1", "optimizer.lr", 1.0),
        ("compile=true", "compile", True),
        ("layout=dp=2", "layout", "dp=2"),
        (" seed = 4 ", "seed", 4),
        ("name='7'", "name", "7"),
        ("optimizer.args.betas=[0.9, 0.95]", "optimizer.args", {"betas": [0.9, 0.95]}),
        ("optimizer.args={eps: 1e-6}", "optimizer.args", {"eps": 1e-6}),
        ("track.mlflow=true", "track.mlflow.experiment", "paceline"),
        ("track.mlflow.experiment=mine", "track.mlflow.experiment", "mine"),
        ("data.val.target=a:b", "data.val.target", "a:b"),
        ("loss=null", "loss", None),
    ],
)
def test_a_value_is_yaml_and_lands_where_it_should(override: str, path: str, value: Any) -> None:
    found: Any = load(None, [override])
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_one_argument_of_the_demo_is_changed_and_the_others_stay() -> None:
    config = load(None, ["model.args.layers=9", "model.args.extra={a: [1]}"])
    assert config.model.args == {**Config().model.args, "layers": 9, "extra": {"a": [1]}}


def test_the_last_of_two_wins_and_a_whole_section_replaces_what_stood_there() -> None:
    assert load(None, ["seed=1", "seed=2"]).seed == 2
    config = load({"train": {"steps": 5, "eval_every": 7}}, ["train={steps: 6}"])
    assert (config.train.steps, config.train.eval_every) == (6, Config().train.eval_every)


def test_switched_on_whole_then_one_key() -> None:
    mlflow = load(None, ["track.mlflow=true", "track.mlflow.uri=sqlite:///x.db"]).track.mlflow
    assert mlflow is not None
    assert (mlflow.uri, mlflow.experiment) == ("sqlite:///x.db", "paceline")


def test_the_source_is_left_as_it_was(tmp_path: Path) -> None:
    data: dict[str, Any] = {"optimizer": {"args": {"betas": [0.9, 0.95]}}}
    load(data, ["optimizer.args.betas=[0.5, 0.5]"])
    assert data == {"optimizer": {"args": {"betas": [0.9, 0.95]}}}
    file = tmp_path / "c.yaml"
    file.write_text("seed: 1\n")
    load(file, ["seed=2"])
    assert file.read_text() == "seed: 1\n"


def test_a_value_that_is_no_yaml() -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, ["optimizer.args.betas=[0.9"])
    assert caught.value.problems == (
        "--set optimizer.args.betas=[0.9: not valid YAML: expected ',' or ']', "
        "but got '<stream end>'",
    )


@pytest.mark.parametrize("written", [{"epochs": 3}, {"epochs": 3, "steps": None}])
def test_an_override_of_one_of_two_exclusive_keys_replaces_the_other(
    written: dict[str, Any],
) -> None:
    config = load_checked({"train": written}, ["train.steps=50"])
    assert (config.train.steps, config.train.epochs) == (50, None)
    config = load_checked({"train": {"steps": 50}}, ["train.epochs=2"])
    assert (config.train.steps, config.train.epochs) == (None, 2)
    config = load_checked({"train": written}, ["train={steps: 50, eval_every: 2}"])
    assert (config.train.steps, config.train.epochs) == (50, None)
    # Nothing to replace: a key that is cleared, or set to what cannot be.
    assert load_checked({"train": {"epochs": 3}}, ["train.steps=null"]).train.epochs == 3


@pytest.mark.parametrize(
    ("data", "overrides"),
    [
        ({}, ["train.steps=50", "train.epochs=2"]),
        ({}, ["train={steps: 50}", "train.epochs=2"]),
        ({}, ["train={steps: 50, epochs: 2}"]),
        ({"train": {"steps": 50, "epochs": 2}}, ["seed=1"]),
    ],
)
def test_one_source_that_sets_both_is_refused(data: Any, overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"train.steps=50 and train.epochs=2 are both set"):
        load_checked(data, overrides)
