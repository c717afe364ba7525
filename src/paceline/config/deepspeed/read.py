"""Reading a DeepSpeed config by the table: each key with its fate, every problem by name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.deepspeed.keys import AUTO, Fate, Key
from paceline.config.deepspeed.table import KEYS, SECTIONS
from paceline.config.keys import nearest
from paceline.errors import ConfigError
from paceline.untrusted import MOST_CONFIG_BYTES, parse_json, read_bytes

_STAGE3 = (
    "param_persistence_threshold",
    "model_persistence_threshold",
    "prefetch_bucket_size",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
_OLD_NAMES = {
    "bfloat16": "bf16",
    "tensor_parallel.tensor_parallel": "tensor_parallel.tp",
    "tensor_parallel.kernel_inject": "tensor_parallel.replace_with_kernel_inject",
    **{f"zero_optimization.{name}": f"zero_optimization.stage3_{name}" for name in _STAGE3},
}
"""Names that DeepSpeed itself takes for others."""
_COMMENTS = ("_comment", "//", "#", "comment")


@dataclass(frozen=True)
class KeyReport:
    """What became of one key of a config; ``text`` is empty where it asked for nothing."""

    key: str
    value: Any
    fate: Fate
    text: str

    def __str__(self) -> str:
        shown = json.dumps(self.value, default=str)
        return f"{self.key}: {shown if len(shown) <= 60 else '…'}: {self.text}"


@dataclass
class Reading:
    """A config by dotted keys, what became of each, and everything that is wrong with it."""

    values: dict[str, Any] = field(default_factory=dict)
    reports: list[KeyReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    autos: list[str] = field(default_factory=list)
    """The used keys that say ``"auto"``: whoever asked for the reading has to fill them in."""

    @property
    def notes(self) -> list[str]:
        """One line for each key that does not do here what it does there."""
        return [str(report) for report in self.reports if report.fate == "noted" and report.text]


def load_ds_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The config in a JSON file, or given as a mapping."""
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    try:
        text = read_bytes(path, MOST_CONFIG_BYTES).decode("utf-8-sig")
        found = parse_json(text)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; name a DeepSpeed config (JSON).") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a DeepSpeed config: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: a DeepSpeed config is a JSON object, not {_kind(found)}.")
    return found


def read_keys(config: Mapping[str, Any]) -> Reading:
    """Look up every key of ``config`` in the table."""
    reading = Reading()
    for name, value in _flat(_in_current_form(config), (), reading):
        _take(reading, name, value)
    return reading


def _in_current_form(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the forms of early versions written as the later ones."""
    found = {_OLD_NAMES.get(key, key): value for key, value in config.items()}
    if isinstance(found.get("zero_optimization"), bool):
        found["zero_optimization"] = {"stage": int(found["zero_optimization"])}
    if found.get("datastates_ckpt") is False:
        found["datastates_ckpt"] = {"enabled": False}
    return found


def _flat(
    section: Mapping[str, Any], path: tuple[str, ...], reading: Reading
) -> Iterator[tuple[str, Any]]:
    """Each key of the table that ``section`` has, with its value; the others are problems."""
    for key, value in section.items():
        if not isinstance(key, str):
            reading.problems.append(f"the key {key!r} must be text.")
            continue
        if key.startswith(_COMMENTS):
            continue
        name = ".".join((*path, key))
        name = _OLD_NAMES.get(name, name)
        if name in KEYS:
            yield name, value
        elif name in SECTIONS:
            _take_switched(reading, name, value)
        elif not any(known.startswith(f"{name}.") for known in KEYS):
            reading.problems.append(_unknown(name, path))
        elif isinstance(value, Mapping):
            yield from _flat(value, (*path, key), reading)
        elif value is not None:
            reading.problems.append(f"{name} must be a mapping; got {_kind(value)}.")


def _take(reading: Reading, name: str, value: Any) -> None:
    key = KEYS[name]
    if value == AUTO and AUTO not in key.nothing:
        if key.fate == "used" and key.auto:
            reading.autos.append(name)
        elif key.fate == "used":
            reading.problems.append(f'{name}: "auto" is not taken here. Write the value.')
        elif key.fate == "refused":
            reading.problems.append(f'{name}: "auto" is not taken here. {key.becomes}')
        return
    value = _plain(value)
    if (wrong := _wrong(key, value)) is not None:
        reading.problems.append(f"{name} must be {wrong}; got {_kind(value)}.")
        return
    asks = not any(value == other and _same_kind(value, other) for other in key.nothing)
    if key.fate == "refused" and asks:
        shown = json.dumps(value, default=str)
        told = "" if isinstance(value, Mapping) or len(shown) > 60 else f"={shown}"
        reading.problems.append(f"{name}{told} is not supported. {key.becomes}")
        return
    reading.values[name] = value
    reading.reports.append(KeyReport(name, value, key.fate, key.becomes if asks else ""))


def _take_switched(reading: Reading, name: str, value: Any) -> None:
    section = SECTIONS[name]
    if value is None:
        return
    if not isinstance(value, Mapping):
        reading.problems.append(f"{name} must be a mapping; got {_kind(value)}.")
        return
    for key in value:
        if key not in section.keys and not str(key).startswith(_COMMENTS):
            near = nearest(str(key), section.keys)
            hint = f"; did you mean {near!r}?" if near else f"; it has {', '.join(section.keys)}"
            reading.problems.append(f"unknown key {f'{name}.{key}'!r}{hint}")
    if _is_on(value, deep=section.deep):
        reading.problems.append(f"{name} is not supported. {section.key.becomes}")
    else:
        reading.reports.append(KeyReport(name, dict(value), "refused", ""))


def _is_on(section: Mapping[str, Any], *, deep: bool) -> bool:
    """Whether a section asks for anything: without a switch, what it holds does."""
    if not section:
        return False
    if deep:
        parts = [part for part in section.values() if isinstance(part, Mapping)]
        inner = [part.get("shared_parameters", part) for part in parts]
        return any(bool(part.get("enabled", True)) for part in inner if isinstance(part, Mapping))
    return bool(section.get("enabled", True))


def _wrong(key: Key, value: Any) -> str | None:
    """What a value should have been, where it is not."""
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    right = {
        "whole": number and float(value).is_integer(),
        "number": number,
        "flag": isinstance(value, bool),
        "text": isinstance(value, str),
        "list": isinstance(value, list | tuple),
        "mapping": isinstance(value, Mapping),
        "any": True,
    }[key.takes]
    return None if right else _WORDS[key.takes]


_WORDS = {
    "whole": "a whole number",
    "number": "a number",
    "flag": "true or false",
    "text": "a text",
    "list": "a list",
    "mapping": "a mapping",
}


def _plain(value: Any) -> Any:
    """5e8 is a whole number too."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _same_kind(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool)


def _unknown(name: str, path: tuple[str, ...]) -> str:
    """The text for a key that DeepSpeed does not document."""
    leaf, where = name.rpartition(".")[2], ".".join(path)
    here = _names_below(path)
    near = nearest(leaf, here)
    if near is not None:
        return f"unknown key {name!r}; did you mean {'.'.join((*path, near))!r}?"
    elsewhere = [known for known in KEYS if known.rpartition(".")[2] == leaf]
    if elsewhere:
        return f"unknown key {name!r}; did you mean {elsewhere[0]!r}?"
    told = f"{where!r} has {', '.join(here)}" if where else "it is no key of DeepSpeed's"
    return f"unknown key {name!r}; {told}. Leave it out."


def _names_below(path: tuple[str, ...]) -> list[str]:
    names = [name.split(".") for name in (*KEYS, *SECTIONS)]
    depth = len(path)
    below = [parts[depth] for parts in names if tuple(parts[:depth]) == path and parts[depth:]]
    return list(dict.fromkeys(below))


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return json.dumps(value, default=str)
