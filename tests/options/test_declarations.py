"""Every option stands once: signatures, docstrings, the config's schema and the rules agree with it."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

import paceline
from paceline.config import Config, Target
from paceline.config.keys import FIELDS, section_of
from paceline.config.sections import in_yaml
from paceline.config.training import EarlyStoppingSection
from paceline.credentials import Secret
from paceline.options import Checkpointing, EngineOptions, TrainerOptions, reference
from paceline.options.declare import Declared, declared, members
from paceline.options.reference import OWNERS
from paceline.options.rules import RULES
from paceline.world import DEFAULT_TIMEOUT

DECLARED = [found for owner in OWNERS for found in declared(owner).values()]
KEYED = {found.key: found for found in DECLARED if found.key is not None}
SECTIONS = {".".join(path) for path, info in FIELDS.items() if section_of(info) is not None}
# A config's default is the demo's, or must be a value of its own where Python has "not given".
OTHER_DEFAULTS = {
    "batch.global_batch",
    "callbacks",
    "checkpoint.every",
    "checkpoint.mode",
    "checkpoint.storage",
    "data.shuffle",
    "launch.timeout",
    "ema.decay",
    "local_steps.every",
    "metrics",
    "track.trackers",
    "train.clip_norm",
}


def parameters(taker: Any) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(taker).parameters)
    assert found.pop("unknown").kind is inspect.Parameter.VAR_KEYWORD
    return {name: found[name] for name in found.keys() - {"model", "optimizer", "loss", "world"}}


def test_signatures_of_engine_and_trainer_are_the_declarations() -> None:
    engine, trainer = declared(EngineOptions), declared(TrainerOptions)
    assert parameters(paceline.Engine).keys() == engine.keys()
    assert parameters(paceline.Trainer).keys() == engine.keys() | trainer.keys()
    for taker in (paceline.Engine, paceline.Trainer):
        for name, parameter in parameters(taker).items():
            found = engine.get(name) or trainer[name]
            sections = isinstance(found.default, tuple(OWNERS)) and name in engine
            assert parameter.default == (None if sections else found.default), name


@pytest.mark.parametrize("taker", [paceline.Engine, paceline.Trainer])
def test_types_in_the_signatures_allow_what_is_declared(taker: Any) -> None:
    hints = typing.get_type_hints(taker.__init__)
    for name, found in {**declared(TrainerOptions), **declared(EngineOptions)}.items():
        if name not in hints:
            continue
        plain = {bool, int, float, str, types.NoneType, *OWNERS}
        for kind in members(found.type):
            literal = typing.get_origin(kind) is typing.Literal
            if kind in plain or literal:
                assert kind in members(hints[name]), name


@pytest.mark.parametrize(
    ("taker", "owner"), [(paceline.Engine, EngineOptions), (paceline.Trainer, TrainerOptions)]
)
def test_docstrings_say_what_is_declared(taker: Any, owner: type) -> None:
    told = " ".join(inspect.getdoc(taker).split())
    for name, found in declared(owner).items():
        assert f"{name}: {found.option.text}" in told


def test_every_option_has_a_sentence() -> None:
    for found in DECLARED:
        assert found.option.text.endswith("."), found.name
        assert "null" not in found.option.text.split(), found.name


def test_every_declared_key_is_in_the_schema() -> None:
    assert KEYED.keys() - {".".join(path) for path in FIELDS} == set()


@pytest.mark.parametrize("key", sorted(KEYED.keys() - SECTIONS))
def test_a_key_is_what_its_option_is(key: str) -> None:
    found, info = KEYED[key], FIELDS[tuple(key.split("."))]
    assert info.description is not None
    assert info.description.startswith(in_yaml(found.option.text))
    if key not in OTHER_DEFAULTS:
        assert info.get_default(call_default_factory=True) == found.default
    for kind in plain(info.annotation):
        assert any(is_like(kind, own) for own in members(found.type)) or is_short(found, kind), kind


def plain(annotation: Any) -> list[Any]:
    """The kinds of value that a key takes, without what pydantic adds to them."""
    if typing.get_origin(annotation) is typing.Annotated:
        return plain(typing.get_args(annotation)[0])
    kinds = members(annotation)
    return [annotation] if len(kinds) == 1 else [one for kind in kinds for one in plain(kind)]


def is_like(kind: Any, own: Any) -> bool:
    """Whether a config may take ``kind`` for an option that takes ``own``: the same, or less."""
    origin, own_origin = (typing.get_origin(one) or one for one in (kind, own))
    if own_origin is Callable:
        return isinstance(kind, type) and issubclass(kind, Target)  # a config names it
    if own is str:
        return kind in (str, Secret) or origin is typing.Literal
    same = {dict: Mapping, list: Sequence}
    return kind == own or same.get(origin, origin) is own_origin


def is_short(found: Declared, kind: Any) -> bool:
    """Whether ``kind`` is a short form of an option with a class of its own, or ``None``, "off"."""
    origin = typing.get_origin(kind) or kind
    has_class = any(own in OWNERS for own in members(found.type))
    return (has_class and origin in (int, typing.Literal)) or (
        kind is types.NoneType and found.key in OTHER_DEFAULTS
    )


def test_rules_name_options_by_their_declared_names() -> None:
    for rule in RULES:
        for setting in rule.settings:
            owner: type = EngineOptions
            for name in setting.split("."):
                found = declared(owner)[name]
                owner = next((kind for kind in members(found.type) if kind in OWNERS), owner)


def test_a_config_becomes_the_options_of_the_engine() -> None:
    assert Config().engine_options() == EngineOptions(clip_norm=Config().train.clip_norm)
    config = Config.model_validate(
        {"tensor": {"vocabulary": False}, "pipeline": {"microbatches": 3}}
    )
    assert config.engine_options().tensor.vocabulary is False
    assert config.engine_options().pipeline.microbatches_for(pp=2) == 3


def test_the_reference_has_a_row_for_every_option() -> None:
    rows = list(reference())
    assert len(rows) == len(DECLARED)
    row = next(row for row in rows if row.key == "checkpoint.keep")
    assert (row.type, row.default, row.bounds, row.takers) == (
        "int",
        "2",
        "1 or more",
        ("Checkpointing",),
    )


def test_an_old_name_works_with_a_warning_that_says_the_new_one() -> None:
    with pytest.warns(DeprecationWarning, match="at_end is called save_at_end now") as seen:
        options = Checkpointing(at_end=False)  # type: ignore[call-arg]
    assert seen[0].filename == __file__
    assert options.save_at_end is False
    with pytest.warns(DeprecationWarning, match="save_at_end"):
        assert options.at_end is False  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.cold
def test_options_import_no_torch() -> None:
    code = "import sys, paceline.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_help_shows_plain_types() -> None:
    assert str(inspect.signature(Checkpointing)).startswith(
        "(every: int | None = None, keep: int = 2"
    )
    made: Callable[..., Any] = Checkpointing
    assert "keep: How many of the latest checkpoints to keep." in (made.__doc__ or "")


def test_the_timeout_that_none_stands_for_is_the_worlds() -> None:
    text = declared(TrainerOptions)["timeout"].option.text
    assert text.endswith(f"None: {DEFAULT_TIMEOUT:g}.")


def test_early_stopping_in_a_config_is_that_of_python() -> None:
    python = dict(inspect.signature(paceline.EarlyStopping).parameters)
    del python["unknown"]  # what it refuses
    assert {name: parameter.default for name, parameter in python.items()} == {
        name: info.default for name, info in EarlyStoppingSection.model_fields.items()
    }
