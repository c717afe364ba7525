"""The arguments of a loader, and what is wrong with one."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any

from paceline.errors import DataError
from paceline.layout import Layout
from paceline.layout.batch import BatchSizes


@dataclass(frozen=True)
class LoaderArguments:
    """What ``paceline.loader`` was asked for, beside the data."""

    sizes: BatchSizes
    seed: int
    shuffle: bool | None
    drop_last: bool | None
    workers: int | None
    pin_memory: bool | None
    collate_fn: Callable[[list[Any]], Any] | None
    rank: int | None
    size: int | None
    layout: str | Layout | None
    sharded_by_rank: bool
    compare: bool

    def __post_init__(self) -> None:
        for name in ("shuffle", "drop_last", "pin_memory", "sharded_by_rank", "compare"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise DataError(f"{name}={value!r} must be True or False.")


def whole_number(name: str, value: Any, least: int, meaning: str) -> int:
    """``value``, or ``DataError`` unless it is a whole number from ``least`` up."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DataError(
            f"{name}={value!r} must be a whole number, {least} or more: it is the {meaning}."
        )
    return value


def check_rank(rank: object, size: object) -> None:
    """Raise ``DataError`` unless ``0 <= rank < size``."""
    for name, value in (("rank", rank), ("size", size)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise DataError(f"{name}={value!r} must be a whole number.")
    assert isinstance(rank, int)
    assert isinstance(size, int)
    if size < 1:
        raise DataError(f"size={size} must be 1 or more: it is the number of ranks.")
    if not 0 <= rank < size:
        raise DataError(f"rank={rank} must be from 0 to size-1={size - 1}: ranks count from 0.")


def check_seed(seed: Any) -> int:
    """``seed``, or ``DataError`` unless it is a whole number."""
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise DataError(f"seed={seed!r} must be a whole number, like 0.")
    return seed


def check_workers(workers: Any) -> int:
    """``workers``, or ``DataError`` unless it is 0 or more."""
    return whole_number("workers", workers, 0, "number of processes that fetch ahead")


def check_stream_workers(workers: int) -> None:
    """Raise ``DataError`` where a stream would be read by several workers."""
    if workers > 1:
        raise DataError(
            f"workers={workers}: each worker would read its own copy of the stream, and the order "
            "would depend on how many there are. A stream may have 0 workers or 1; prefetch inside "
            "the dataset, or use a dataset with __getitem__ and __len__."
        )


def check_sharded(sharded_by_rank: bool, fixed: tuple[int, int] | None, drop_last: bool) -> None:
    """Raise ``DataError`` where ``sharded_by_rank`` does not go with the other arguments."""
    if sharded_by_rank and fixed is not None and fixed[1] > 1:
        raise DataError(
            f"sharded_by_rank=True with rank={fixed[0]}, size={fixed[1]}: ranks that read their "
            "own streams tell each other how many samples they have, for which they need a world. "
            "Leave rank and size out."
        )
    if sharded_by_rank and drop_last:
        raise DataError(
            "drop_last=True with sharded_by_rank: once the shortest stream has ended, every batch "
            "is short, and all that is left of the others would be dropped. Leave drop_last out: "
            "ranks whose stream has ended get empty batches until all have."
        )


def import_function(name: str) -> Callable[..., Any]:
    """The function or class that the import path ``name`` leads to."""
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(
            f"cannot import {name!r}: {error}. Give an import path like 'package.module:name'."
        ) from error
    if not callable(found):
        raise DataError(f"{name!r} is a {type(found).__name__}, but must be a function or a class.")
    return found


def length_of(value: Any) -> int | None:
    """``len(value)`` where it has one."""
    if not isinstance(value, Sized):
        return None
    try:
        return len(value)
    except (TypeError, NotImplementedError):  # torch's samplers inherit a __len__ that may raise
        return None
