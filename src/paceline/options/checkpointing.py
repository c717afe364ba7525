"""When state is saved, what is kept, and where."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from paceline.credentials import named_key
from paceline.errors import TrainingError
from paceline.options.arguments import documented, renamed
from paceline.options.declare import Option, check

_A_PLACE = "a folder or a URL"


@renamed(at_end="save_at_end")
@documented
@dataclass(frozen=True)
class Checkpointing:
    """When state is saved, what is kept, and where; see docs/guides/checkpoints.md."""

    config_section: ClassVar[str] = "checkpoint"

    every: Annotated[int | None, Option("Save every this many steps.", ge=1)] = None
    keep: Annotated[int, Option("How many of the latest checkpoints to keep.", ge=1)] = 2
    best: Annotated[
        str | None,
        Option(
            "Also keep the best by this validation metric, such as 'loss'.",
            must="the name of a metric",
        ),
    ] = None
    mode: Annotated[
        Literal["min", "max"] | None,
        Option(
            "Whether a smaller or a larger value of best is better; to be said of every metric but "
            "a loss.",
            must="'min' (smaller is better) or 'max'",
        ),
    ] = None
    save_at_end: Annotated[
        bool, Option("Save when the run ends. An interrupted run always saves.")
    ] = True
    every_minutes: Annotated[
        float | None,
        Option(
            "Save when this many minutes have passed since the last save.", gt=0, must="above 0"
        ),
    ] = None
    every_epoch: Annotated[bool, Option("Save at the end of each epoch.")] = False
    keep_best: Annotated[
        int, Option("How many of the best to keep, where best is given.", ge=1)
    ] = 1
    keep_every: Annotated[
        int | None,
        Option(
            "Keep those whose step is a multiple of this for good.",
            ge=1,
        ),
    ] = None
    asynchronous: Annotated[
        bool, Option("Write while training goes on, which stands still for a copy to memory only.")
    ] = True
    on_failure: Annotated[
        Literal["warn", "stop"],
        Option("What a save that fails does to the run. The last save of a run raises either way."),
    ] = "warn"
    retry_seconds: Annotated[
        float,
        Option(
            "For how long the last save of a run is tried again where it fails, so that there is "
            "time to make room.",
            ge=0,
            lt=float("inf"),
            must="0 or more",
        ),
    ] = 30.0
    where: Annotated[
        str | None,
        Option(
            "A folder or a URL such as s3://bucket/run. None: checkpoints/ in the run's folder.",
            must=_A_PLACE,
        ),
    ] = None
    storage: Annotated[
        Mapping[str, Any] | None,
        Option(
            "Options for that URL's file system, as fsspec takes them. Credentials are named: "
            "env:NAME or file:/path.",
            must="a dict of fsspec's options",
        ),
    ] = field(default=None, repr=False)  # may hold credentials
    memory_every: Annotated[
        int | None,
        Option(
            "Every this many steps, keep a copy of the state in memory that outlives a crash of "
            "the process and, with several nodes, of a node.",
            ge=1,
        ),
    ] = None
    start_from: Annotated[
        str | None,
        Option("Begin a new run with the weights of this checkpoint, run or URL.", must=_A_PLACE),
    ] = None
    digest: Annotated[
        Literal["xxh3", "blake2b"],
        Option(
            "How bytes are hashed: xxh3 is fast and finds damage, blake2b is a cryptographic hash.",
        ),
    ] = "xxh3"
    digest_key: Annotated[
        str | None,
        Option(
            "With blake2b: the key that checkpoints are written with, and must have been written "
            "with to be read, by reference: env:NAME or file:/path.",
            must="a reference, env:NAME or file:/path",
        ),
    ] = None

    def __post_init__(self) -> None:
        for name in ("where", "start_from"):
            if isinstance(place := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(place))
        check(self, "Checkpointing: ")
        _ = self.direction  # refuses a metric of which nobody can know it
        for name in ("where", "start_from"):
            if getattr(self, name) is not None and not str(getattr(self, name)):
                raise TrainingError(f"Checkpointing: {name}='' must be {_A_PLACE}.")
        if self.digest_key is not None:
            named_key(self.digest_key)
            if self.digest != "blake2b":
                raise TrainingError(
                    f"Checkpointing: digest={self.digest!r} takes no digest_key; 'blake2b' does."
                )

    @property
    def direction(self) -> Literal["min", "max"]:
        """Which way the metric ``best`` is to go: ``mode``, or that of a loss."""
        return direction(self.best, self.mode, "Checkpointing(best=)")


def direction(
    metric: str | None, mode: Literal["min", "max"] | None, who: str
) -> Literal["min", "max"]:
    """``mode``; without one a loss is to be small, and of other metrics nobody can know."""
    if mode is not None:
        return mode
    if metric is None or is_loss(metric):
        return "min"
    raise TrainingError(
        f"{who}: is a larger {metric!r} better, or a smaller one? Pass mode='max' or mode='min'."
    )


def is_loss(metric: str) -> bool:
    """Whether the name says that less is better; of other metrics nobody can know."""
    return metric.endswith("loss")
