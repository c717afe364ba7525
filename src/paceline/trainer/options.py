"""The trainer's settings, by section."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.checkpoint.hashing import NAMES, check_reference
from paceline.engine.arguments import check_switches
from paceline.errors import TrainingError
from paceline.trainer.callbacks import direction, sign_of


@dataclass(frozen=True)
class DataOptions:
    """How batches are drawn; :func:`paceline.loader` explains each.

    ``shuffle`` is about the training data; ``None`` shuffles it unless it comes as a stream.
    ``sharded_by_rank`` is about data that comes as a stream.
    """

    workers: int = 0
    shuffle: bool | None = None
    drop_last: bool = False
    pin_memory: bool | None = None
    collate_fn: Callable[..., Any] | None = None
    sharded_by_rank: bool = False
    compare: bool = True

    def __post_init__(self) -> None:
        check_count("DataOptions", "workers", 0 if self.workers is None else self.workers, least=0)
        check_switches(
            "DataOptions: ",
            drop_last=self.drop_last,
            sharded_by_rank=self.sharded_by_rank,
            compare=self.compare,
        )
        for name in ("shuffle", "pin_memory"):
            if (value := getattr(self, name)) is not None:
                check_switches("DataOptions: ", **{name: value})
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise TrainingError(
                f"DataOptions: collate_fn={self.collate_fn!r} must be a function that makes a "
                "batch of a list of samples."
            )


@dataclass(frozen=True)
class Evaluation:
    """When to evaluate: every ``every`` steps (``None``: after each epoch), and always at the end.

    ``batches`` bounds the global batches of one pass; ``None`` is the whole validation data.
    """

    every: int | None = None
    batches: int | None = None

    def __post_init__(self) -> None:
        _at_least_one(self, "every", "batches")


@dataclass(frozen=True)
class Checkpointing:
    """When state is saved, what is kept, and where.

    Args:
        every: save every so many steps.
        every_minutes: save when so many minutes have passed since the last save.
        every_epoch: save at the end of each epoch.
        at_end: save when the run ends. An interrupted run always saves.
        keep: how many of the newest stay.
        best: keep the best by this validation metric, too.
        mode: whether a smaller (``min``) or a larger (``max``) value of it is better; to be said
            of every metric but a loss.
        keep_best: how many of the best stay.
        keep_every: those whose step is a multiple of it stay for good.
        asynchronous: write while training goes on; the run stands still for a copy to memory only.
        on_failure: what a save that fails does to the run: ``warn`` or ``stop``. The last save of
            a run raises either way.
        retry_seconds: for how long the last save of a run is tried again where it fails, so that
            there is time to make room. Saves on the way are tried again by themselves.
        where: a folder or a URL such as ``s3://bucket/run``; ``run_dir/checkpoints`` by default.
        storage: options for that URL's file system, as fsspec takes them. A credential is better
            named than given: ``env:NAME``, ``file:/path``, or a ``paceline.config.Secret``.
        memory_every: every so many steps, keep a copy of the state in memory that outlives a
            crash of the process (and, with several nodes, of a node).
        digest: how bytes are hashed: ``xxh3``, which is fast and finds damage, or ``blake2b``, a
            cryptographic hash.
        digest_key: with ``blake2b``, the key that checkpoints are written with and must have been
            written with to be read, by reference: ``env:NAME`` or ``file:/path``.
        start_from: begin a new run with the weights of this checkpoint, run or URL.
    """

    every: int | None = None
    keep: int = 2
    best: str | None = None
    mode: Literal["min", "max"] | None = None
    at_end: bool = True
    every_minutes: float | None = None
    every_epoch: bool = False
    keep_best: int = 1
    keep_every: int | None = None
    asynchronous: bool = True
    on_failure: str = "warn"
    retry_seconds: float = 30.0
    where: str | None = None
    storage: Mapping[str, Any] | None = field(default=None, repr=False)  # may hold credentials
    memory_every: int | None = None
    start_from: str | None = None
    digest: Literal["xxh3", "blake2b"] = "xxh3"
    digest_key: str | None = None

    def __post_init__(self) -> None:
        _at_least_one(self, "every", "keep", "keep_best", "keep_every", "memory_every")
        check_switches(
            "Checkpointing: ",
            at_end=self.at_end,
            every_epoch=self.every_epoch,
            asynchronous=self.asynchronous,
        )
        if not isinstance(self.best, str | None):
            raise TrainingError(f"Checkpointing: best={self.best!r} must be the name of a metric.")
        sign_of(self.direction)
        for name in ("where", "start_from"):
            place = getattr(self, name)
            if place is not None and (not isinstance(place, str | os.PathLike) or not str(place)):
                raise TrainingError(f"Checkpointing: {name}={place!r} must be a folder or a URL.")
        if self.storage is not None and not isinstance(self.storage, Mapping):
            raise TrainingError(
                f"Checkpointing: storage={self.storage!r} must be a dict of fsspec's options."
            )
        minutes = self.every_minutes
        if minutes is not None and not (_is_number(minutes) and minutes > 0):
            raise TrainingError(f"Checkpointing: every_minutes={minutes!r} must be above 0.")
        retry = self.retry_seconds
        if not (_is_number(retry) and 0 <= retry < float("inf")):
            raise TrainingError(f"Checkpointing: retry_seconds={retry!r} must be 0 or more.")
        if self.on_failure not in ("warn", "stop"):
            raise TrainingError(
                f"Checkpointing: on_failure={self.on_failure!r} must be 'warn' or 'stop'."
            )
        if self.digest not in NAMES:
            raise TrainingError(
                f"Checkpointing: digest={self.digest!r} must be one of {', '.join(NAMES)}."
            )
        if self.digest_key is not None:
            check_reference(self.digest_key)
            if self.digest != "blake2b":
                raise TrainingError(
                    f"Checkpointing: digest={self.digest!r} takes no digest_key; 'blake2b' does."
                )

    @property
    def direction(self) -> Literal["min", "max"]:
        """Which way the metric ``best`` is to go: ``mode``, or that of a loss."""
        return direction(self.best, self.mode, "Checkpointing(best=)")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _at_least_one(options: Any, *names: str) -> None:
    for name in names:
        check_count(type(options).__name__, name, getattr(options, name))


def check_count(whose: str, name: str, value: Any, least: int = 1) -> None:
    """Refuse anything but ``None`` and a whole number from ``least`` up."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise TrainingError(f"{whose}: {name}={value!r} must be a whole number, {least} or more.")
