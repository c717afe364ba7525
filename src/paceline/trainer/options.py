"""The trainer's settings, by section."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.errors import TrainingError
from paceline.trainer.callbacks import sign_of


@dataclass(frozen=True)
class DataOptions:
    """How batches are drawn; :func:`paceline.loader` explains each.

    ``shuffle`` is about the training data; ``None`` shuffles it unless it comes as a stream.
    """

    workers: int = 0
    shuffle: bool | None = None
    drop_last: bool = False
    pin_memory: bool | None = None
    collate_fn: Callable[..., Any] | None = None


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
    """What is saved in ``run_dir/checkpoints``: every ``every`` steps, on a stop, and at the end.

    The newest ``keep`` stay; with ``best``, the best by that validation metric stays too.
    """

    every: int | None = None
    keep: int = 2
    best: str | None = None
    mode: str = "min"
    at_end: bool = True

    def __post_init__(self) -> None:
        _at_least_one(self, "every", "keep")
        sign_of(self.mode)


def _at_least_one(options: Any, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise TrainingError(
                f"{type(options).__name__}: {name}={value!r} must be a whole number, 1 or more."
            )
