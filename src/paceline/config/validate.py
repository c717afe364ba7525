"""From plain data to a ``Config``, or to one message for every problem in it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from paceline.config.keys import (
    FIELDS,
    declared_path,
    is_free,
    keys_of,
    section_of,
    suggest,
    unknown_key,
)
from paceline.config.schema import Config
from paceline.config.sources import MOST_MESSAGES, Path, Sources
from paceline.config.values import choice_meant, expected, found

_SHORT_FORMS: dict[Path, str] = {
    ("track", "mlflow"): "true, false",
    ("track", "wandb"): "true, false",
    ("track", "comet"): "true, false",
    ("early_stopping",): "true, false",
    ("compress",): "a format such as int8",
    ("local_steps",): "a number of steps such as 50",
    ("ema",): "a decay such as 0.999",
}
"""What may stand for a whole section."""


def validate(
    data: Mapping[str, Any], sources: Sources
) -> tuple[Config | None, list[tuple[Path, str]]]:
    """The config that ``data`` describes, and every problem with it by itself.

    Where there are problems, the config is what is left without the keys they are about: good
    enough to look for more of them, ``None`` if it is not. ``sources`` says where each key was
    written; the config remembers it for later messages.
    """
    problems: list[tuple[Path, str]] = []
    known = _without_unknown(data, (), (), sources, problems)
    config: Config | None = None
    try:
        config = Config.model_validate(known)
    except ValidationError as error:
        wrong = explain(error)
        problems += wrong
        with contextlib.suppress(ValidationError):
            config = Config.model_validate(_without(known, [path for path, _ in wrong]))
    if config is not None:
        config._sources = sources
    return config, problems


def _without(data: Mapping[str, Any], paths: list[Path]) -> dict[str, Any]:
    """``data`` without the keys at ``paths``."""
    left = {}
    for key, value in data.items():
        below = [path[1:] for path in paths if path[:1] == (key,)]
        if () in below:
            continue
        left[key] = _without(value, below) if below and isinstance(value, Mapping) else value
    return left


def explain(error: ValidationError) -> list[tuple[Path, str]]:
    """The path and the text of each problem pydantic found, one for each key."""
    texts: dict[Path, str] = {}
    for detail in error.errors():
        path, text = _explain_one(detail)
        texts.setdefault(path, text)
    return list(texts.items())


def _explain_one(detail: ErrorDetails) -> tuple[Path, str]:
    # Members of a union add their own name to the end of the location: keep what is a key.
    path = tuple(str(part) for part in detail["loc"])
    while path and not _is_key(path) and detail["type"] != "extra_forbidden":
        path = path[:-1]
    dotted = ".".join(path)
    match detail["type"]:
        case "extra_forbidden":
            return path, unknown_key(path, path[:-1], suggest(path[:-1], path[-1]))
        case "missing":
            return path, f"{dotted} is missing; it takes {_takes(path)}"
        case "value_error":
            text = str(detail["ctx"]["error"])
            return path, text if path == ("layout",) else f"{dotted}: {text}"
    value = detail["input"]
    if (info := FIELDS.get(declared_path(path))) is None:  # an item of several
        keys = ", ".join(keys_of(path))
        return path, f"{dotted} must be a mapping with keys among {keys}; got {found(value)}"
    meant = choice_meant(info, value)
    hint = f"; did you mean {meant!r}?" if meant else ""
    if value is None and (section_of(info) or is_free(path)):
        hint = "; give it keys, or leave it out"
    # What stands for a whole mapping of options may be a credential.
    got = "a string" if path[-1] == "storage" and isinstance(value, str) else found(value)
    return path, f"{dotted} must be {_takes(path)}; got {got}{hint}"


def _is_key(path: Path) -> bool:
    """Whether ``path`` is a key of the schema, or an item of several sections."""
    return declared_path(path) in FIELDS or bool(keys_of(path))


def _takes(path: Path) -> str:
    if path in _SHORT_FORMS:
        return f"{_SHORT_FORMS[path]}, or a mapping with keys among {', '.join(keys_of(path))}"
    if path[-1] == "target":
        return "an import path like 'package.module:Name'"
    return expected(FIELDS[declared_path(path)])


def _without_unknown(
    data: Mapping[str, Any],
    path: Path,
    written: Path,
    sources: Sources,
    problems: list[tuple[Path, str]],
) -> dict[str, Any]:
    """``data`` with its unknown keys left out and each noted in ``problems``.

    A misspelled section is read as the one that was meant, so that its own problems show too;
    ``written`` is the path as it stands in the file.
    """
    known: dict[str, Any] = {}
    for key, value in data.items():
        place, meant = (*written, str(key)), (*path, str(key))
        if meant not in FIELDS:
            # To look for what was meant takes a while: not for a whole file of something else.
            guess = suggest(path, str(key)) if len(problems) < MOST_MESSAGES else None
            problems.append((place, unknown_key(place, path, guess)))
            if guess is None or guess[:-1] != path or guess[-1] in data or not keys_of(guess):
                continue
            meant = guess
            sources.rename(place, meant)
        if isinstance(value, Mapping) and keys_of(meant):
            value = _without_unknown(value, meant, place, sources, problems)
        known[meant[-1]] = value
    return known
