"""All options in a row, for the tables of the documentation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.options.checkpointing import Checkpointing
from paceline.options.compression import Compression
from paceline.options.data import DataOptions
from paceline.options.declare import Declared, declared, range_in_words
from paceline.options.ema import EMA
from paceline.options.engine import EngineOptions
from paceline.options.local_steps import LocalSteps
from paceline.options.loss_scaling import LossScaling
from paceline.options.pipeline import Pipelining
from paceline.options.recompute import Recompute
from paceline.options.reduction import Reduction
from paceline.options.sharding import Sharding
from paceline.options.tensor import TensorParallel
from paceline.options.trainer import Evaluation, TrainerOptions

OWNERS: dict[type, tuple[str, ...]] = {
    EngineOptions: ("Engine", "Trainer"),
    TrainerOptions: ("Trainer",),
    Sharding: ("Sharding",),
    TensorParallel: ("TensorParallel",),
    Pipelining: ("Pipelining",),
    Recompute: ("Recompute",),
    Compression: ("Compression",),
    LocalSteps: ("LocalSteps",),
    Reduction: ("Reduction",),
    EMA: ("EMA",),
    LossScaling: ("LossScaling",),
    DataOptions: ("DataOptions",),
    Evaluation: ("Evaluation",),
    Checkpointing: ("Checkpointing",),
}
"""The classes that declare options, and the public names that take them as arguments."""


@dataclass(frozen=True)
class Documented:
    """An option as the documentation shows it."""

    name: str
    type: str
    default: str
    bounds: str
    text: str
    key: str | None
    """Its config key; ``None`` where it can be given in Python alone."""
    takers: tuple[str, ...]
    """What takes it in Python: ``("Engine", "Trainer")``."""


def reference() -> Iterator[Documented]:
    """Every option, class by class, in the order of declaration."""
    for owner, takers in OWNERS.items():
        for name, found in declared(owner).items():
            yield Documented(
                name=name,
                type=found.type_in_words,
                default=_default(found.default),
                bounds=range_in_words(found.option.bounds).strip(", "),
                text=found.option.text,
                key=found.key,
                takers=takers,
            )


def option_at(key: str) -> Declared | None:
    """The declaration behind a config key, where Python has the option as well."""
    options = (found for owner in OWNERS for found in declared(owner).values())
    return next((found for found in options if found.key == key), None)


def _default(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}()"
    return repr(value)
