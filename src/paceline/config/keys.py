"""The keys a config may have, and the one a person meant when they wrote another."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paceline.config.schema import Config
from paceline.config.sources import Path
from paceline.credentials import Secret
from paceline.options.habits import HABITS, IN_SECTION, SECTIONS, Habit, habit_of


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    """The class of the section that a field holds, or ``None`` for a plain value."""
    if typing.get_origin(info.annotation) in (dict, list):
        return None
    for kind in (info.annotation, *typing.get_args(info.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def item_section_of(info: FieldInfo) -> type[BaseModel] | None:
    """The class of the sections that a list or a mapping of them holds, else ``None``."""
    if typing.get_origin(info.annotation) not in (dict, list):
        return None
    kind = typing.get_args(info.annotation)[-1]
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _tree(section: type[BaseModel], path: Path) -> Iterable[tuple[Path, FieldInfo]]:
    for name, info in section.model_fields.items():
        yield (*path, name), info
        if (inner := section_of(info)) is not None:
            yield from _tree(inner, (*path, name))
        elif (item := item_section_of(info)) is not None:
            yield from _tree(item, (*path, name, ANY))


ANY = "*"
"""Stands for each item of a list or mapping of sections: ``metrics.*.target``."""

FIELDS: dict[Path, FieldInfo] = dict(_tree(Config, ()))
"""Every key of the schema, sections included, by its path."""

_CONTAINERS = [path for path, info in FIELDS.items() if item_section_of(info) is not None]


def declared_path(path: Path) -> Path:
    """``path`` as ``FIELDS`` has it: ``metrics.f1.target`` is ``metrics.*.target``."""
    for container in _CONTAINERS:
        if path[: len(container)] == container and len(path) > len(container):
            return (*container, ANY, *path[len(container) + 1 :])
    return path


def is_free(path: Path) -> bool:
    """Whether ``path`` is a mapping of arguments, whose keys are the user's own."""
    return path[-1] == "args" and declared_path(path) in FIELDS


def is_secret(path: Path) -> bool:
    """Whether ``path`` is a key that takes a reference to a credential."""
    info = FIELDS.get(path)
    return info is not None and Secret in (info.annotation, *typing.get_args(info.annotation))


def keys_of(path: Path) -> list[str]:
    """The names that may stand directly below ``path``."""
    path = declared_path(path)
    return [found[-1] for found in FIELDS if len(found) == len(path) + 1 and found[:-1] == path]


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.7) -> str | None:
    """The choice spelled most like ``word``, or ``None`` when none is close."""
    choices = list(choices)
    lowered = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower().replace("-", "_"), lowered, n=1, cutoff=cutoff)
    return lowered[near[0]] if near else None


def suggest(section: Path, key: str) -> Path | None:
    """The key that was probably meant by the unknown ``key`` of ``section``, if any comes near."""
    here = keys_of(section)
    word = key.lower().replace("-", "_")
    for one in IN_SECTION.get(word, ()):
        if one in here:
            return (*section, one)
    if word in SECTIONS:
        return (SECTIONS[word],)
    if (habit := _habit_of(word)) is not None:
        return tuple(habit.meaning.key.split(".")) if habit.meaning.key else None
    if (near := nearest(word, here)) is not None:
        return (*section, near)
    plain = [path for path in FIELDS if ANY not in path]
    elsewhere = [path for path in plain if path[-1] == word and not section_of(FIELDS[path])]
    if elsewhere:
        return elsewhere[0]
    leaves = {path[-1]: path for path in reversed(plain)}
    if (near := nearest(word, leaves, cutoff=0.8)) is not None:
        return leaves[near]
    known = [name for name, habit in HABITS.items() if habit.in_config and habit.meaning.key]
    near = nearest(word, known, cutoff=0.85)
    return None if near is None else tuple((HABITS[near].meaning.key or "").split("."))


def _habit_of(word: str) -> Habit | None:
    """What is known of a key from other libraries, where a config does not have it."""
    habit = habit_of(word)
    return habit if habit is not None and habit.in_config else None


def unknown_key(written: Path, section: Path, meant: Path | None) -> str:
    """The text for the unknown key ``written``, which stands in (what was meant by) ``section``."""
    key = ".".join(written)
    habit = _habit_of(written[-1])
    if meant is not None:
        dotted, like = ".".join(meant), ""
        if habit is not None and habit.meaning.key == dotted:
            note = habit.meaning.note
            like = f" (like {habit.meaning.in_config}{f'; {note}' if note else ''})"
        return f"unknown key {key!r}; did you mean {dotted!r}?{like}"
    if habit is not None:
        return f"unknown key {key!r}. {habit.meaning.sentence().rstrip('.')}"
    where = f"{'.'.join(section)!r} has" if section else "the keys of a config are"
    return f"unknown key {key!r}; {where} {', '.join(keys_of(section))}"
