"""The checkpoints of a run at a glance: as many as there are, without reading all of any.

Imports no torch, so that a command that only looks answers at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import xxhash

from paceline.checkpoint.finding import _OLD, _STEP, locate
from paceline.checkpoint.manifest import FORMAT, NAME, Manifest
from paceline.checkpoint.storage import LocalStorage, Storage
from paceline.errors import CheckpointError

_ASKED_AT_ONCE = 16


@dataclass(frozen=True)
class Listed:
    """One checkpoint. ``state``: ``whole`` (by its manifest and its files' sizes; ``verify`` reads
    every byte), ``damaged`` (``problem`` says how), ``unfinished``, or ``old`` (Paceline 0.1)."""

    step: int
    name: str
    path: str
    state: str
    problem: str = ""
    bytes: int = 0
    files: int = 0
    info: dict[str, Any] = field(default_factory=dict)


def list_checkpoints(where: str | os.PathLike[str]) -> list[Listed]:
    """What is there, oldest first: all that ``where`` stands for, unfinished and damaged included.

    Each manifest is checked against its own hash, and each file for being there; locally for its
    size too. The tensors that a manifest lists, by far its largest part, are not looked at.
    """
    place = locate(where)
    storage = place.open()
    names = [place.name] if place.name is not None else storage.names()
    steps = [name for name in names if _STEP.fullmatch(name) or place.name is not None]
    old = [name for name in names if _OLD.fullmatch(name)]
    if isinstance(storage, LocalStorage):
        listed = [_look(storage, name) for name in steps]
    else:  # each answer takes a while, whatever its size
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
            listed = list(pool.map(lambda name: _look(storage, name), steps))
    listed += [_look_at_old(storage, name) for name in old]
    return sorted(listed, key=lambda one: (one.step, one.name))


def _look(storage: Storage, name: str) -> Listed:
    step = int(name.partition("-")[2]) if _STEP.fullmatch(name) else 0
    path = storage.full(name)
    present = storage.names(name)
    if NAME not in present:
        return Listed(step, name, path, "unfinished", "it has no manifest", files=len(present))
    try:
        found = _summary(storage.read_bytes(f"{name}/{NAME}"), storage.full(f"{name}/{NAME}"))
    except CheckpointError as error:
        return Listed(step, name, path, "damaged", str(error), files=len(present))
    sizes: dict[str, int] = found["sizes"]
    problem = ""
    if not _STEP.fullmatch(name):
        step = found["step"]
    if found["step"] != step:
        problem = f"its manifest is that of step {found['step']}"
    elif missing := sorted(sizes.keys() - set(present)):
        problem = f"{missing[0]} is missing"
    elif isinstance(storage, LocalStorage):
        problem = _wrong_size(storage, name, sizes)
    state = "damaged" if problem else "whole"
    size, count = sum(sizes.values()), len(sizes)
    return Listed(step, name, path, state, problem, size, count, found["info"])


def _look_at_old(storage: Storage, name: str) -> Listed:
    step = name.removeprefix("step-").removesuffix(".pt")
    size = storage.size(name) or 0
    problem = "of Paceline 0.1; 'paceline checkpoint import' brings its weights over"
    number = int(step) if step.isdecimal() else 0
    return Listed(number, name, storage.full(name), "old", problem, size, 1)


def _wrong_size(storage: Storage, name: str, sizes: dict[str, int]) -> str:
    for file, expected in sizes.items():
        if (found := storage.size(f"{name}/{file}")) != expected:
            return f"{file}: expected {expected} bytes, found {found}"
    return ""


def _summary(data: bytes, where: str) -> dict[str, Any]:
    """Step, info and the sizes of files of a manifest, which may go on for megabytes after them."""
    first, _, rest = data.partition(b"\n")
    body = rest[:-1]
    if not _is_intact(first, body):
        Manifest.from_bytes(data, where)  # raises, and says what is wrong
    found: dict[str, Any] = {}
    try:
        for key, value in _members(body.decode()):
            found[key] = value
            if key == "files":
                break
        sizes = {str(file): int(entry[0]) for file, entry in found["files"].items()}
        return {"step": int(found["step"]), "info": dict(found["info"]), "sizes": sizes}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(
            f"{where} is damaged: it does not read like one ({type(error).__name__}: {error})."
        ) from error


def _is_intact(first: bytes, body: bytes) -> bool:
    try:
        head = json.loads(first)
        expected = FORMAT, len(body), xxhash.xxh3_128_hexdigest(body)
        return (head["paceline_checkpoint"], head["bytes"], head["xxh3_128"]) == expected
    except (ValueError, KeyError, TypeError):
        return False


def _members(text: str) -> Iterator[tuple[str, Any]]:
    """Keys and values of a JSON object one by one; what nobody asks for is never parsed."""
    decoder, at = json.JSONDecoder(), 1
    while text[at - 1] != "}":
        key, at = decoder.raw_decode(text, at)
        value, at = decoder.raw_decode(text, at + 1)
        at += 1
        yield key, value
