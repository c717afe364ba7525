"""What Config is: strict, frozen, the demo by default, and the same after a trip through YAML."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.config import (
    Config,
    Model,
    Schedule,
    Train,
    check,
    dump,
    json_schema,
    load,
    resolve,
)
from paceline.config.keys import FIELDS
from paceline.errors import ConfigError, LayoutError
from paceline.masking import literals

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.sampled_from(["on", "no", "3e-4", "1_000", "null", "~", "<<", "=", "0x10", "2024-01-01"])
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3)
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=4))
@example({"a\x85b": "c\x85"})
def test_any_arguments_survive_the_trip_through_yaml(
    tmp_path_factory: pytest.TempPathFactory, args: dict[str, Any]
) -> None:
    assume(not list(literals(args)))  # which are refused
    config = Config(model=Model(target="a.b:C", args=args))
    file = tmp_path_factory.mktemp("trip") / "c.yaml"
    file.write_text(dump(config), encoding="utf-8")
    assert load(file) == config


def test_the_demo_survives_and_stays_what_it_is_for_other_yaml_readers() -> None:
    text = dump(Config())
    assert yaml.safe_load(text) == Config().model_dump()


def test_resolving_makes_auto_explicit_and_can_be_repeated() -> None:
    resolved = resolve(Config(), devices=0)
    assert (resolved.launch.nproc, resolved.layout) == (2, "dp=2")
    assert resolve(resolved, devices=0) == resolved
    assert resolve(Config(), devices=4).layout == "dp=4"
    assert resolve(load(None, ["launch.device=cpu"]), devices=4).launch.nproc == 2
    assert resolve(load(None, ["layout=dp=3"]), devices=0).launch.nproc == 3
    assert resolve(load(None, ["launch.nproc=5"]), devices=0).layout == "dp=5"
    with pytest.raises(LayoutError):
        resolve(load(None, ["launch.nproc=5", "layout=dp=4"]), devices=0)


def test_defaults_that_follow_another_key() -> None:
    demo = Config()
    assert demo.loss is not None
    own = load({"model": {"target": "my:Net"}})
    assert (own.model.args, own.loss) == ({}, None)
    assert load({"model": {"target": demo.model.target}}).loss == demo.loss
    adjusted = load({"model": {"args": {"layers": 9}}}).model
    assert adjusted.args == {**demo.model.args, "layers": 9}
    assert load({"data": {"target": "my:data"}}).data.args == {}
    assert load({"train": {"epochs": 2}}).train.steps is None
    assert load({"train": {"epochs": None}}).train.steps == demo.train.steps


def test_a_config_of_ones_own_inherits_nothing_of_the_demos_training() -> None:
    for section in ({"model": {"target": "my:Net"}}, {"data": {"target": "my:data"}}):
        own = load({**section, "optimizer": {"name": "sgd"}})
        assert (own.schedule.name, own.schedule.warmup_steps, own.schedule.min_ratio) == (
            "constant", 0, 0.0
        )  # fmt: skip
        assert (own.train.steps, own.train.clip_norm, own.optimizer.lr) == (None, None, 1e-3)
        assert any("how long to train" in problem for problem in check(own, devices=0))
    # What it does say stands, and only that is another's; built in Python, too.
    said = load(
        {"model": {"target": "my:Net"}, "schedule": {"name": "cosine"}, "train": {"steps": 9}}
    )
    assert (said.schedule.name, said.schedule.warmup_steps, said.train.steps) == ("cosine", 0, 9)
    built = Config(model=Model(target="my:Net"), train=Train(steps=9), schedule=Schedule())
    assert (built.schedule, built.train.clip_norm) == (
        Schedule(name="constant", warmup_steps=0, min_ratio=0.0),
        None,
    )
    # A file that an earlier version wrote has every key, and keeps it.
    assert (
        load(Config().model_dump() | {"model": {"target": "my:Net", "args": {}}}).schedule.name
        == "cosine"
    )


def test_mlflow_may_be_switched_on_and_off() -> None:
    assert load({"track": {"mlflow": False}}).track.mlflow is None
    switched_on = load({"track": {"mlflow": True}}).track.mlflow
    assert switched_on is not None
    assert switched_on.experiment == "paceline"


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().seed = 3  # type: ignore[misc]


def test_two_demos_do_not_share_their_arguments() -> None:
    assert Config(model=Model()).model.args is not Config(model=Model()).model.args


def test_where_it_was_written_does_not_make_a_config_different() -> None:
    assert load(None, ["seed=0"]) == Config()
    assert Config(seed=1) != Config()
    assert Config() != "demo"


def test_every_key_says_what_it_means() -> None:
    undescribed = [".".join(path) for path, info in FIELDS.items() if not info.description]
    assert undescribed == []


def test_json_schema_for_editors() -> None:
    schema = json.loads(json.dumps(json_schema()))
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(Config.model_fields)
    train = schema["$defs"]["Train"]["properties"]
    assert train["steps"]["description"].startswith("Optimizer steps to train for")
    assert schema["properties"]["precision"]["enum"] == ["fp32", "bf16", "fp16", "fp64"]
    mlflow = schema["$defs"]["Track"]["properties"]["mlflow"]["anyOf"]
    assert {"type": "boolean"} in mlflow
    assert {"type": "string"} in schema["properties"]["compress"]["anyOf"]
    assert {"type": "integer"} in schema["properties"]["local_steps"]["anyOf"]
    assert "required" not in schema


def test_a_list_is_called_a_list() -> None:
    with pytest.raises(ConfigError, match="code must be a list or null"):
        load({"code": "../modules"})
