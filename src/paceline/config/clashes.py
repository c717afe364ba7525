"""Settings that do not go together by a rule of layouts, or say nothing without another one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.config.schema import Config
from paceline.config.sections import Section
from paceline.config.sources import Path
from paceline.layout import Layout
from paceline.options import EngineOptions, Form
from paceline.options.declare import declared
from paceline.options.rules import Combination, broken_rule, clash


def rule_problems(config: Config, layout: Layout) -> Iterator[tuple[Path, str]]:
    """The rule that ``config`` breaks on ``layout``: the settings that clash come first."""
    options = config.engine_options(max_memory=None)  # of which no rule has anything to say
    found = broken_rule(Combination(layout, options))
    if found is None:
        return
    rule, reason = found
    paths = [path for setting in rule.settings for path in keys_of_setting(config, setting)]
    blamed = config._sources.culprit(*paths)
    ordered = [blamed, *(path for path in paths if path != blamed)]
    told = [words(config, path) for path in ordered]
    place = config._sources.place(blamed)[1]
    if place != f"--set {'.'.join(blamed)}={_value(config, blamed)}":
        start = f"{clash(told)}: "
    else:  # the message begins with it already
        start = f"does not go with {', '.join(told[1:])}: " if told[1:] else ""
    yield blamed, f"{start}{reason} [rule: {rule.name}]"


def keys_of_setting(config: Config, setting: str) -> list[Path]:
    """The keys of ``config`` that ask for ``setting``."""
    if setting == "layout" and config.layout == "auto":
        return []  # nobody asked for it
    if setting == "compress":
        compress = config.compress
        named = {"format": [compress.format], "rules": list(compress.rules.values())}
        return [
            ("compress", key)
            for key, texts in named.items()
            if any(Form.parse(text).name != "none" for text in texts)
        ]
    if setting == "reduction":
        asked = config.reduction.options().asked
        return [("reduction", text.partition("=")[0]) for text in asked]
    if setting == "local_steps":
        return [("local_steps", "every")]
    if setting == "ema":
        return [("ema", "decay")]
    key = declared(EngineOptions)[setting].key if "." not in setting else setting
    assert key is not None
    return [tuple(key.split("."))]


def without_effect(config: Config) -> Iterator[tuple[Path, str]]:
    """What was set of compression, local steps or an average, which nobody has switched on.

    To say that there are none (``compress.format=none``, ``local_steps.every=null``) is a way to
    switch them off for a run, and the rest may stay as it is.
    """
    compress, rounds = config.compress, config.local_steps
    if compress.options().formats is None and "format" not in compress.model_fields_set:
        yield from _idle(config, "compress", compress, "format", "set that, as in int8")
    if config.max_memory is not None and config.device_map is None:
        yield (
            ("max_memory",),
            "max_memory has no effect without device_map; set that, as in auto, or leave this out",
        )
    if rounds.every is None and "every" not in rounds.model_fields_set:
        yield from _idle(config, "local_steps", rounds, "every", "set that, as in 50")
    if config.ema.decay is None and "decay" not in config.ema.model_fields_set:
        yield from _idle(config, "ema", config.ema, "decay", "set that, as in 0.999")


def _idle(
    config: Config, name: str, section: Section, switch: str, advice: str
) -> Iterator[tuple[Path, str]]:
    for key, info in type(section).model_fields.items():
        if getattr(section, key) != info.get_default(call_default_factory=True):
            yield (
                (name, key),
                f"{words(config, (name, key))} has no effect without {name}.{switch}; {advice}, or "
                "leave this out",
            )


def words(config: Config, path: Path) -> str:
    """A key with its value, in short: ``compress.format=int8``."""
    value, dotted = _value(config, path), ".".join(path)
    if path == ("layout",):
        return f"layout {value!r}"
    return dotted if value.startswith("{") else f"{dotted}={value}"


def _value(config: Config, path: Path) -> str:
    """As a person writes it in YAML."""
    value: Any = config
    for key in path:
        value = getattr(value, key)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
