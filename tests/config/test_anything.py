"""Whatever is given as a config, the answer is a config or messages, never another exception."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import Config, check, dump, load, resolve, yaml_file
from paceline.config.keys import FIELDS
from paceline.errors import ConfigError

KEYS = st.sampled_from(sorted({name for path in FIELDS for name in path})) | st.text(max_size=8)
VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 2**70)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["auto", "dp=2", "tp=2", "cpu", "linear", "os.path:join", "math:x", "a.b:c"])
)
ANYTHING = st.recursive(
    VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4)
)


def config_or_messages(source: Any, overrides: list[str]) -> None:
    try:
        config = load(source, overrides)
    except ConfigError as error:
        problems = error.problems
    else:
        problems = ()
    assert all(problem.strip() for problem in problems)
    if not problems and not check(config, devices=0):
        assert isinstance(resolve(config, devices=0), Config)
        dump(config)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(KEYS, ANYTHING, max_size=6))
def test_any_mapping(data: dict[str, Any]) -> None:
    config_or_messages(data, [])


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(Config.model_fields)), ANYTHING, max_size=4))
def test_any_sections(data: dict[str, Any]) -> None:
    config_or_messages(data, [])


OVERRIDE = st.builds(
    lambda path, value: f"{'.'.join(path)}={value}",
    st.lists(KEYS, min_size=1, max_size=4) | st.sampled_from(sorted(map(list, FIELDS))),
    VALUES | st.text(),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(OVERRIDE | st.text(), max_size=4))
def test_any_overrides(overrides: list[str]) -> None:
    config_or_messages(None, overrides)


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("train:steps\n \t{}[],'\"#&*!|>-?%@`<0123.e~\x85\u2028é")))
def test_any_text(text: str) -> None:
    message = "x.yaml: fine"
    try:
        yaml_file.read(text, "x.yaml")
    except ConfigError as error:
        message = str(error)
    assert message.startswith("x.yaml:")
