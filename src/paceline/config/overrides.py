"""``--set a.b=c``: values given on the command line, laid over those of the file."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import paceline.config.yaml_file as yaml_file
from paceline.config.keys import is_secret
from paceline.config.parallelism import spelled_out
from paceline.config.sources import Path, Sources
from paceline.config.values import found
from paceline.errors import ConfigError
from paceline.masking import MASK, is_reference, masked, says_secret, shown

EXCLUSIVE: tuple[tuple[Path, Path], ...] = ((("train", "steps"), ("train", "epochs")),)
"""Pairs of keys of which a config sets one: an override of either replaces the other."""
_LONGEST_SHOWN = 200


def apply(
    data: Mapping[str, Any], overrides: Iterable[str], sources: Sources
) -> tuple[dict[str, Any], list[str]]:
    """``data`` with each ``key=value`` laid over it in turn, and the problems met on the way.

    The value is YAML (``[0.9, 0.95]``, ``null``, ``3e-4``); it replaces whatever stood at the key,
    and at the other one of an exclusive pair. Overrides that set both are left to contradict each
    other. ``sources`` is told where the new values come from.
    """
    result = copy.deepcopy(dict(data))
    problems: list[str] = []
    laid: list[Path] = []
    for override in overrides:
        place = f"--set {as_shown(override)}"
        try:
            path, value = parse(override)
            _put(result, path, spelled_out(path[0], value) if len(path) == 1 else value)
        except ConfigError as error:
            problems += [f"{place}: {text}" for text in error.problems]
            continue
        sources.add_override(path, place)
        laid.append(path)
    for pair in EXCLUSIVE:
        _replace_other(result, pair, laid)
    return result, problems


def as_shown(override: str) -> str:
    """``override`` as it may be repeated: a credential in it is masked, a long one cut short."""
    key, equals, text = override.partition("=")
    if len(override) > _LONGEST_SHOWN:
        return f"{key[:60]}{'…' * (len(key) > 60)}{equals}… ({len(text):,} characters)"
    names = [part.strip() for part in key.split(".")]
    in_storage = "storage" in names
    if says_secret(names[-1], bare_key=in_storage) or is_secret(tuple(names)):
        return f"{key}{equals}{MASK}" if not is_reference(text.strip()) else override
    try:
        value = yaml_file.read_value(text)
    except ConfigError:
        # Nobody knows what it holds.
        return f"{key}{equals}{MASK}" if in_storage else masked(override)
    if isinstance(value, str | int | float) and in_storage and len(names) < 3:
        return f"{key}{equals}{MASK}"  # what stands for a whole mapping of options
    if shown(value, names[-1], bare_key=in_storage) != value:
        return f"{key}{equals}{masked(text) if isinstance(value, str) else MASK}"
    return override


def _replace_other(data: dict[str, Any], pair: tuple[Path, Path], laid: list[Path]) -> None:
    """Clear the key of ``pair`` that the file set, where an override sets the other one."""
    for key, other in (pair, pair[::-1]):
        replaces = _is_laid(key, laid) and not _is_laid(other, laid)
        if replaces and _get(data, key) is not None and _get(data, other) is not None:
            _put(data, other, None)


def _is_laid(key: Path, laid: list[Path]) -> bool:
    return any(key[: len(path)] == path for path in laid)


def _get(data: Any, path: Path) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def in_users_words(problems: Iterable[str], flags: Mapping[str, str]) -> list[str]:
    """``problems`` that blame ``--set KEY=VALUE``, with the flag that stood for it instead.

    ``flags`` maps overrides to the words of the command line that they come from.
    """
    told = list(problems)
    for override, flag in flags.items():
        told = [text.replace(f"--set {as_shown(override)}", flag) for text in told]
    return told


def parse(override: str) -> tuple[Path, Any]:
    """``train.steps=100`` as its path and its value; raises ``ConfigError``."""
    key, equals, text = override.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise ConfigError("must be key=value, like train.steps=100")
    if not text.strip():
        raise ConfigError(f"no value after '='; write {key.strip()}=null to clear it")
    try:
        return path, yaml_file.read_value(text, path)
    except ConfigError as error:
        raise ConfigError([problem.partition(": ")[2] for problem in error.problems]) from None


def _put(data: dict[str, Any], path: Path, value: Any) -> None:
    for depth, key in enumerate(path[:-1], start=1):
        inner = data.get(key)
        if inner is None or inner is True:  # nothing there yet, or a section switched on whole
            inner = data[key] = {}
        if not isinstance(inner, dict):
            dotted = ".".join(path[:depth])
            raise ConfigError(f"{dotted} is {found(inner)}, not a mapping; set {dotted} whole")
        data = inner
    data[path[-1]] = value
