"""Reading a config: a file, a dict or nothing (the demo), with overrides laid over it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath
from typing import Any

import paceline.config.overrides as overriding
import paceline.config.python_file as python_file
import paceline.config.yaml_file as yaml_file
from paceline.config.bounds import check_bounds
from paceline.config.checks import check
from paceline.config.keys import nearest
from paceline.config.parallelism import spelled_out
from paceline.config.schema import Config
from paceline.config.sources import Path, Sources
from paceline.config.validate import validate
from paceline.config.values import found
from paceline.errors import ConfigError
from paceline.untrusted import MOST_CONFIG_BYTES, read_bytes

SUFFIXES = (".yaml", ".yml", ".json", ".py")


def load(
    source: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None,
    overrides: Iterable[str] = (),
) -> Config:
    """The config in ``source`` with ``overrides`` (``"train.steps=100"``) laid over it.

    ``source`` is a YAML or JSON file, a Python file that defines ``config``, a dict, a
    ``Config``, or ``None`` for the demo. Raises ``ConfigError`` with every problem of
    the values by themselves; ``paceline.config.check`` finds those that need several of them.
    """
    config, problems, _ = _parse(source, overrides)
    if problems or config is None:
        raise ConfigError(problems)
    return config


def load_checked(
    source: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None,
    overrides: Iterable[str] = (),
    *,
    devices: int | None = None,
    trying_wire: bool = False,
) -> Config:
    """Like ``load``, and ``paceline.config.check`` too: the problems of both at once."""
    config, problems, broken = _parse(source, overrides)
    if config is not None:
        problems += check(config, devices=devices, leaving_out=broken, trying_wire=trying_wire)
    if problems or config is None:
        raise ConfigError(problems)
    return config


def _parse(
    source: str | os.PathLike[str] | Mapping[str, Any] | Config | None, overrides: Iterable[str]
) -> tuple[Config | None, list[str], list[Path]]:
    """What of the config is sound, the problems with the rest, and the keys they are about."""
    sources = Sources()
    unreadable: list[str] = []
    data: Mapping[str, Any] = {}
    overrides = list(overrides)
    try:
        data = _with_deepspeed(_read(source, sources), overrides, sources)
        data = {key: spelled_out(key, value) for key, value in data.items()}
    except ConfigError as error:
        unreadable += error.problems
    merged, override_problems = overriding.apply(data, overrides, sources)
    merged.pop("deepspeed", None)  # what it asks for is in the sections now
    try:
        check_bounds(merged)
    except ConfigError as error:
        return None, [*unreadable, *override_problems, f"the config with --set {error}"], []
    if unreadable:
        return None, unreadable + override_problems, []
    config, problems = validate(merged, sources)
    if override_problems:  # nobody knows what they were to change
        config = None
    return config, sources.messages(problems) + override_problems, [path for path, _ in problems]


def _with_deepspeed(
    data: Mapping[str, Any], overrides: list[str], sources: Sources
) -> Mapping[str, Any]:
    """``data`` with the sections that its key ``deepspeed``, or an override of it, stands for."""
    laid = [text for text in overrides if re.match(r"\s*deepspeed\s*[.=]", text)]
    if data.get("deepspeed") is None and not laid:
        return data
    # Only a config that has the key pays for the table of DeepSpeed's.
    from paceline.config.deepspeed.sections import expand, loaded

    folder = os.path.dirname(os.path.abspath(sources.origin or "config"))
    if laid:  # of the whole config, or of single keys in it
        whole = {"deepspeed": loaded(data.get("deepspeed"), folder)}
        data = {**data, **overriding.apply(whole, laid, Sources())[0]}
    expansion = expand(data, folder)
    sources.mapped, sources.notes = expansion.mapped, expansion.notes
    if data.get("layout", "auto") == "auto":
        sources.spread_layout = expansion.data.get("layout", "auto")
    return expansion.data


def _read(
    source: str | os.PathLike[str] | Mapping[str, Any] | Config | None, sources: Sources
) -> Mapping[str, Any]:
    """The plain data of ``source``; tells ``sources`` where its keys stand."""
    if source is None:
        return {}
    if isinstance(source, Config):
        sources.origin = source._sources.origin
        sources.places = dict(source._sources.places)
        sources.spread_layout = source._sources.spread_layout
        return source.model_dump()
    if isinstance(source, Mapping):
        return _bounded(source, "the config")
    name = os.fspath(source)
    text = _text(FilePath(name), name)
    reader = python_file.read if name.endswith(".py") else yaml_file.read
    data, lines = reader(text, name)
    sources.origin = name
    sources.add_lines(lines)
    if data is None:
        raise ConfigError(
            f"{name}: empty; write at least one key, or give no config to train the demo"
        )
    if isinstance(data, Config):
        return data.model_dump()
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{name}: must be a mapping of keys, like 'train: {{steps: 100}}'; got {found(data)}"
        )
    return _bounded(data, f"{name}:")


def _bounded(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    try:
        check_bounds(data)
    except ConfigError as error:
        raise ConfigError(f"{name} {error}") from None
    return data


def _text(file: FilePath, name: str) -> str:
    try:
        if file.is_dir():
            raise ConfigError(f"{name}: is a folder, not a config file{_hint_for_folder(file)}")
        if not file.exists():
            raise ConfigError(_missing(file, name))
        if file.suffix not in SUFFIXES:
            raise ConfigError(f"{name}: a config file must end with {', '.join(SUFFIXES)}")
        return read_bytes(file, MOST_CONFIG_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name}: not UTF-8 text (byte {error.object[error.start]:#04x} at offset "
            f"{error.start}); save it as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror or error}") from None
    except ConfigError:
        raise
    except ValueError as error:  # a name with a NUL in it
        raise ConfigError(f"{name}: {error}") from None


def _hint_for_folder(folder: FilePath) -> str:
    inside = folder / "config.yaml"
    if (folder / "events.jsonl").is_file() and inside.is_file():
        return (
            f"; go on with the run in it: paceline train --resume {folder}; or start anew with its "
            f"config: '{inside}'"
        )
    if inside.is_file():
        return f"; did you mean '{inside}'?"
    there = sorted(item.name for item in folder.iterdir() if item.suffix in SUFFIXES)
    return f"; the configs there are {', '.join(there[:10])}" if there else ""


def _missing(file: FilePath, name: str) -> str:
    folder = file.parent
    if not folder.is_dir():
        return f"{name}: no such file; there is no folder '{folder}'"
    there = sorted(item.name for item in folder.iterdir() if item.suffix in SUFFIXES)
    by_stem = {FilePath(found).stem: found for found in there}
    near = nearest(file.stem, by_stem, 0.6)
    if near is not None:
        return f"{name}: no such file; did you mean '{folder / by_stem[near]}'?"
    listing = f"; the configs there are {', '.join(there[:10])}" if there else ""
    return f"{name}: no such file{listing}"
