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
from paceline.options.other_names import ELSEWHERE, IN_SECTION

_NOTES = {
    "accelerator": "auto, cpu or cuda",
    "amp": "like precision: bf16",
    "backend": "cpu or cuda: ranks talk over Gloo on CPUs, over NCCL on GPUs",
    "batch_size": "samples per step over all ranks; batch.per_device_batch: on each of them",
    "bf16": "like precision: bf16",
    "devices": "how many ranks on each machine",
    "fp16": "like precision: fp16",
    "fsdp": "zero=3",
    "master_addr": "HOST:PORT",
    "master_port": "HOST:PORT",
    "min_lr": "a fraction of the full rate",
    "strategy": "ddp: auto; fsdp: zero=3; deepspeed: zero=1, zero=2 or zero=3 for its stages",
    "warmup_ratio": "a number of steps",
}
"""What to know when the other framework's key means something slightly different."""


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
    if IN_SECTION.get(word) in here:
        return (*section, IN_SECTION[word])
    if word in ELSEWHERE:
        return tuple(ELSEWHERE[word].split("."))
    if (near := nearest(word, here)) is not None:
        return (*section, near)
    plain = [path for path in FIELDS if ANY not in path]
    elsewhere = [path for path in plain if path[-1] == word and not section_of(FIELDS[path])]
    if elsewhere:
        return elsewhere[0]
    leaves = {path[-1]: path for path in reversed(plain)}
    near = nearest(word, leaves, cutoff=0.8) or nearest(word, ELSEWHERE, cutoff=0.85)
    if near is None:
        return None
    return leaves[near] if near in leaves else tuple(ELSEWHERE[near].split("."))


def unknown_key(written: Path, section: Path, meant: Path | None) -> str:
    """The text for the unknown key ``written``, which stands in (what was meant by) ``section``."""
    key = ".".join(written)
    if meant is not None:
        note = _NOTES.get(written[-1])
        return (
            f"unknown key {key!r}; did you mean {'.'.join(meant)!r}?{f' ({note})' if note else ''}"
        )
    where = f"{'.'.join(section)!r} has" if section else "the keys of a config are"
    return f"unknown key {key!r}; {where} {', '.join(keys_of(section))}"
