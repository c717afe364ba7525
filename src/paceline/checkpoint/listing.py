"""The checkpoints of a run at a glance: as many as there are, without reading all of any.

Imports no torch, so that a command that only looks answers at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import paceline.checkpoint.manifest_fields as fields
from paceline.checkpoint.hashing import Digest
from paceline.checkpoint.locate import locate
from paceline.checkpoint.manifest import MANIFEST, checked_body, file_from_json, is_old, step_of
from paceline.checkpoint.storage.local import LocalStorage
from paceline.checkpoint.storage.storage import Storage
from paceline.errors import CheckpointError, KeyNeeded, StorageError

_ASKED_AT_ONCE = 32


@dataclass(frozen=True)
class Listed:
    """One checkpoint. ``state``: ``whole`` (by its manifest and its files' sizes; ``verify`` reads
    every byte), ``damaged`` (``problem`` says how), ``keyed`` (it takes the key to tell),
    ``unfinished``, or ``old`` (Paceline 0.1)."""

    step: int
    name: str
    path: str
    state: str
    problem: str = ""
    bytes: int = 0
    files: int = 0
    info: dict[str, Any] = field(default_factory=dict)


def list_checkpoints(
    where: str | os.PathLike[str], *, follow: bool = False, key: str | None = None
) -> list[Listed]:
    """What is there, oldest first: all that ``where`` stands for, unfinished and damaged included.

    Each manifest is checked against its own hash, and each file for being there in its size. The
    tensors that a manifest lists, by far its largest part, are not looked at. For ``follow`` and
    ``key`` see ``locate``.
    """
    place = locate(where, follow=follow, key=key)
    storage = place.open()
    names = [place.name] if place.name is not None else storage.names()
    steps = [name for name in names if step_of(name) is not None or place.name is not None]
    old = [name for name in names if is_old(name)]
    if isinstance(storage, LocalStorage):
        listed = [_look(storage, name, _local_files(storage, name)) for name in steps]
    else:
        listed = _look_remotely(storage, steps)
    if any(one.state != "whole" for one in listed):
        # A run that is under way may have deleted some while we looked: those are not damaged.
        there = {*storage.names()}
        listed = [one for one in listed if one.state == "whole" or one.name in there]
    listed += [_look_at_old(storage, name) for name in old]
    return sorted(listed, key=lambda one: (one.step, one.name))


def _local_files(storage: Storage, name: str) -> dict[str, int]:
    return {file: storage.size(f"{name}/{file}") or 0 for file in storage.names(name)}


def _look_remotely(storage: Storage, names: list[str]) -> list[Listed]:
    """Each answer takes a while whatever its size: ask for much at a time, many times at once."""
    from paceline.checkpoint.storage.remote import FsspecStorage

    assert isinstance(storage, FsspecStorage)
    if not names:
        return []
    top = storage.root if len(names) > 1 else f"{storage.root}/{names[0]}"
    try:
        everything = storage.fs.find(top, detail=True)
    except Exception as error:  # stores raise their client library's own kinds
        raise StorageError(
            f"cannot list {storage.where}: {storage.text_of(error)}."
        ) from storage.cause(error)
    files: dict[str, dict[str, int]] = {name: {} for name in names}
    inside = storage.root.strip("/") + "/"
    for path, info in everything.items():
        name, _, file = path.strip("/").removeprefix(inside).partition("/")
        if name in files:
            files[name][file] = int(info["size"])
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        return list(pool.map(lambda name: _look(storage, name, files[name]), names))


def _look(storage: Storage, name: str, files: Mapping[str, int]) -> Listed:
    step = step_of(name) or 0
    path = storage.full(name)
    if MANIFEST not in files:
        return Listed(step, name, path, "unfinished", "it has no manifest", files=len(files))
    if files[MANIFEST] > fields.MOST_BYTES:
        problem = fields.too_large(storage.full(f"{name}/{MANIFEST}"), files[MANIFEST])
        return Listed(step, name, path, "damaged", problem, files=len(files))
    try:
        data = _read(storage, f"{name}/{MANIFEST}", files[MANIFEST])
        found = _summary(data, storage.full(f"{name}/{MANIFEST}"), storage.digest)
    except CheckpointError as error:
        state = "keyed" if isinstance(error, KeyNeeded) else "damaged"
        return Listed(step, name, path, state, str(error), files=len(files))
    if step_of(name) is None:
        step = found["step"]
    sizes: dict[str, int] = found["sizes"]
    problem = ""
    if found["step"] != step:
        problem = f"its manifest is that of step {found['step']}"
    for file, expected in sizes.items():
        if file not in files:
            problem = problem or f"{file} is missing"
        elif files[file] != expected:
            problem = problem or f"{file}: expected {expected} bytes, found {files[file]}"
    state = "damaged" if problem else "whole"
    size, count = sum(sizes.values()), len(sizes)
    return Listed(step, name, path, state, problem, size, count, found["info"])


def _read(storage: Storage, path: str, size: int) -> bytes:
    """All bytes of a file whose size is known, in one request where each takes a while."""
    if isinstance(storage, LocalStorage):
        return storage.read_bytes(path)
    from paceline.checkpoint.storage.remote import FsspecStorage

    assert isinstance(storage, FsspecStorage)
    return storage.read_range(path, 0, size)


def _look_at_old(storage: Storage, name: str) -> Listed:
    step = name.removeprefix("step-").removesuffix(".pt")
    size = storage.size(name) or 0
    problem = "of Paceline 0.1; 'paceline checkpoint import' brings its weights over"
    number = int(step) if step.isdecimal() else 0
    return Listed(number, name, storage.full(name), "old", problem, size, 1)


def _summary(data: bytes, where: str, digest: Digest) -> dict[str, Any]:
    """Step, info and the sizes of files of a manifest, which may go on for megabytes after them."""
    found: dict[str, Any] = {}
    try:
        body, _ = checked_body(data, where, digest)
        for key, value in _members(body.decode()):
            found[key] = value
            if key == "files":
                break
        files = fields.mapping(fields.member(found, "files"), "files")
        return {
            "step": fields.count(fields.member(found, "step"), "step"),
            "info": fields.info(fields.member(found, "info")),
            "sizes": {name: file_from_json(name, entry).size for name, entry in files.items()},
        }
    except (ValueError, IndexError) as error:
        raise CheckpointError(f"{where} is damaged: {error}.") from error
    except RecursionError as error:
        raise CheckpointError(f"{where} is damaged: it is nested too deeply.") from error


def _members(text: str) -> Iterator[tuple[str, Any]]:
    """Keys and values of a JSON object one by one; what nobody asks for is never parsed."""
    decoder, at = json.JSONDecoder(), 1
    while text[at - 1] != "}":
        key, at = decoder.raw_decode(text, at)
        value, at = decoder.raw_decode(text, at + 1)
        at += 1
        yield key, value
