"""Counting the samples of shards once, and remembering it in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.data.shard_formats import BLOCK, FileFormat, ShardFormat, ShardIndex
from paceline.errors import DataError
from paceline.untrusted import parse_json, read_bytes

_VERSION = 1
_MOST_BYTES = 4 * 1024**3
_AT_ONCE = 8


def index_shards(
    shards: Sequence[Any], shard_format: ShardFormat, file: str | os.PathLike[str] | None
) -> list[ShardIndex]:
    """The index of each shard: out of ``file`` where that knows the shard as it is now.

    What had to be counted is written to ``file`` for the next time.
    """
    if file is None:
        return _count(shard_format, list(shards))
    known = _load(Path(file), shard_format.name)
    names = [shard_format.shown(shard) for shard in shards]
    versions = [shard_format.version(shard) for shard in shards]
    missing = [
        place
        for place, name in enumerate(names)
        if name not in known or known[name][0] != versions[place]
    ]
    counted = _count(shard_format, [shards[place] for place in missing])
    for place, index in zip(missing, counted, strict=True):
        known[names[place]] = (versions[place], index)
    if missing:
        _save(Path(file), shard_format.name, known)
    return [known[name][1] for name in names]


def _count(shard_format: ShardFormat, shards: list[Any]) -> list[ShardIndex]:
    if isinstance(shard_format, FileFormat) and len(shards) > 1:
        with ThreadPoolExecutor(_AT_ONCE) as pool:  # copying remote files is mostly waiting
            return list(pool.map(shard_format.index, shards))
    return [shard_format.index(shard) for shard in shards]


def _load(path: Path, name: str) -> dict[str, tuple[str | None, ShardIndex]]:
    if not path.exists():
        return {}
    try:
        data = parse_json(read_bytes(path, _MOST_BYTES))
        if (data["version"], data["format"], data["block"]) != (_VERSION, name, BLOCK):
            return {}
        known = {
            str(each["shard"]): (
                None if each["changed"] is None else str(each["changed"]),
                ShardIndex(_number(each["count"]), tuple(map(_number, each["offsets"]))),
            )
            for each in data["shards"]
        }
        for shard, (_, index) in known.items():
            _check_offsets(shard, index)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is no index of shards: {type(error).__name__}: {error}. Remove it, and it is "
            "made anew; or give index= another name."
        ) from error
    return known


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no whole number, 0 or more")
    return value


def _check_offsets(shard: str, index: ShardIndex) -> None:
    offsets = index.offsets
    if offsets and len(offsets) != -(-index.count // BLOCK) + 1:
        raise ValueError(f"{shard} has {len(offsets)} offsets for {index.count} samples")
    if any(one > two for one, two in pairwise(offsets)):
        raise ValueError(f"the offsets of {shard} do not ascend")


def _save(path: Path, name: str, known: dict[str, tuple[str | None, ShardIndex]]) -> None:
    shards = [
        {"shard": shard, "changed": changed, "count": index.count, "offsets": index.offsets}
        for shard, (changed, index) in known.items()
    ]
    data = {"version": _VERSION, "format": name, "block": BLOCK, "shards": shards}
    # Every rank may write it: each a whole file, which takes the place of the last in one step.
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(json.dumps(data), encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise DataError(
            f"cannot write the index of shards to {path}: {error.strerror}. Give index= a path "
            "that can be written, or leave it out."
        ) from error
