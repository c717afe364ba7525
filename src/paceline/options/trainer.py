"""The options of ``paceline.Trainer`` beside those of its engine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from paceline.options.arguments import documented
from paceline.options.checkpointing import Checkpointing
from paceline.options.data import DataOptions
from paceline.options.declare import Option, check


@documented
@dataclass(frozen=True)
class Evaluation:
    """When to evaluate, and on how much; a run always evaluates at its end."""

    every: Annotated[
        int | None,
        Option(
            "Evaluate every this many steps. None: after each epoch and at the end.",
            key="train.eval_every",
            ge=1,
        ),
    ] = None
    batches: Annotated[
        int | None,
        Option(
            "Global batches per evaluation. None: the whole validation data.",
            key="train.eval_batches",
            ge=1,
        ),
    ] = None

    def __post_init__(self) -> None:
        check(self, "Evaluation: ")


@documented
@dataclass(frozen=True)
class TrainerOptions:
    """How a trainer runs, beside what its engine does."""

    config_section: ClassVar[str] = ""

    global_batch: Annotated[
        int | None,
        Option(
            "Samples per optimizer step, over all ranks. In Python not needed where the data is a "
            "torch DataLoader, whose batch size it then is.",
            key="batch.global_batch",
            ge=1,
        ),
    ] = None
    per_device_batch: Annotated[
        int | None,
        Option(
            "Instead of global_batch: samples per forward pass on one rank. global_batch is "
            "then per_device_batch × data-parallel ranks × accumulate. A run that is resumed "
            "on another number of ranks keeps the global batch it began with.",
            key="batch.per_device_batch",
            ge=1,
        ),
    ] = None
    accumulate: Annotated[
        int | None,
        Option(
            "Forward passes whose gradients make one step, on each rank.",
            key="batch.accumulate",
            ge=1,
        ),
    ] = None
    run_dir: Annotated[
        str | os.PathLike[str] | None,
        Option(
            "The run's folder for events and checkpoints. None keeps nothing on disk.",
            key="",
            must="a folder's path, or None to keep nothing on disk",
        ),
    ] = None
    seed: Annotated[
        int,
        Option(
            "The seed of the order of samples, of dropout and of everything else that is random.",
            ge=0,
        ),
    ] = 0
    metrics: Annotated[
        Mapping[str, Any] | None,
        Option(
            "Validation metrics by name, called as metric(output, target) on each batch and "
            "returning its mean over the samples or a pair (sum, count); or paceline.WholeSet for "
            "metrics that need everything at once, or a metric of torchmetrics.",
        ),
    ] = None
    callbacks: Annotated[
        Sequence[Any], Option("Code called during the run: paceline.Callback.")
    ] = ()
    trackers: Annotated[
        Sequence[Any],
        Option(
            "Readers of the run's events, such as those in paceline.track.", key="track.trackers"
        ),
    ] = ()
    progress: Annotated[
        bool,
        Option(
            "Show a progress bar, or lines where the output is not a terminal.",
            key="track.progress",
        ),
    ] = True
    data: Annotated[DataOptions, Option("How batches are drawn.")] = DataOptions()
    evaluation: Annotated[Evaluation, Option("When to evaluate.", key="")] = Evaluation()
    checkpoint: Annotated[Checkpointing, Option("What is saved and kept.")] = Checkpointing()
    timeout: Annotated[
        float | None,
        Option(
            "Seconds a rank waits for the others before giving up. In Python None: 300.",
            key="launch.timeout",
            gt=0,
        ),
    ] = None
    measure_memory: Annotated[
        bool,
        Option(
            "Measure the second step, and report the bytes on each rank as an event.",
            key="track.memory",
        ),
    ] = False
    split_every: Annotated[
        int | None,
        Option(
            "Every this many steps, report where each rank's time went, and who is slow, as "
            "events. None: never.",
            key="track.split_every",
            ge=1,
        ),
    ] = 50
    objects: Annotated[
        Mapping[str, Any] | None,
        Option(
            "By name, anything else to save and restore: it needs state_dict and load_state_dict.",
            key="",
        ),
    ] = None

    def __post_init__(self) -> None:
        check(self)
