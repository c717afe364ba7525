"""Everything that a config names to be imported, in one list; metrics of torchmetrics by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config.fields import SCHEDULES, TORCH_SCHEDULERS
from paceline.config.schema import Config
from paceline.config.sources import Path
from paceline.config.targets import look_up
from paceline.errors import ConfigError

_TORCHMETRICS = tuple(
    f"torchmetrics{package}"
    for package in ("", ".classification", ".regression", ".text", ".retrieval", ".image",
                    ".audio", ".clustering", ".nominal", ".detection", ".segmentation", ".wrappers")
)  # fmt: skip
"""Where a metric of torchmetrics may be; few are in all of them, so that the first one counts."""


@dataclass(frozen=True)
class NamedTarget:
    """An import path in a config, with the arguments beside it.

    Args:
        path: its key, such as ``model.target``.
        target: the import path.
        args: the keyword arguments it is called with.
        calls_function_later: a function is called later, with more arguments.
        given: arguments that are passed besides.
    """

    path: Path
    target: str
    args: Mapping[str, Any]
    calls_function_later: bool = False
    given: Collection[str] = ()


def named_targets(config: Config, folders: Sequence[str] = ()) -> Iterator[NamedTarget]:
    """Every import path that ``config`` names, by its key.

    A metric of torchmetrics that is not there is left out: ``torchmetrics_path`` says why.
    """
    yield NamedTarget(("model", "target"), config.model.target, config.model.args)
    yield NamedTarget(("data", "target"), config.data.target, config.data.args)
    yield NamedTarget(("optimizer", "name"), config.optimizer.target, config.optimizer.args)
    if (loss := config.loss) is not None:
        yield NamedTarget(("loss", "target"), loss.target, loss.args, True)
    if (val := config.data.val) is not None:
        yield NamedTarget(("data", "val", "target"), val.target, val.args)
    if (collate := config.data.collate_fn) is not None:
        yield NamedTarget(("data", "collate_fn", "target"), collate.target, collate.args, True)
    schedule = config.schedule
    if (target := scheduler_path(schedule.name)) is not None:
        filled = {"optimizer", "max_lr", *LENGTHS}
        yield NamedTarget(("schedule", "name"), target, schedule.args, True, filled)
    for name, metric in config.metrics.items():
        path = metric.target if ":" in metric.target else torchmetrics_path(metric.target, folders)
        if path is not None:
            yield NamedTarget(("metrics", name, "target"), path, metric.args, True)
    for number, callback in enumerate(config.callbacks):
        yield NamedTarget(("callbacks", str(number), "target"), callback.target, callback.args)
    for number, tracker in enumerate(config.track.trackers):
        at = ("track", "trackers", str(number), "target")
        yield NamedTarget(at, tracker.target, tracker.args, given=["run_dir"])


LENGTHS = ("total_steps", "T_max", "num_training_steps", "total_num_steps")
"""What schedulers call the length of the run; it is filled in where the config leaves it out."""


def scheduler_path(name: str) -> str | None:
    """The import path of a schedule that is not Paceline's own."""
    if name in TORCH_SCHEDULERS:
        return f"torch.optim.lr_scheduler:{name}"
    return None if name in SCHEDULES else name


def torchmetrics_path(name: str, folders: Sequence[str] = ()) -> str | None:
    """The import path of the metric ``name`` of torchmetrics; ``None`` where there is none."""
    if importlib.util.find_spec("torchmetrics") is None:
        return None
    for package in _TORCHMETRICS:
        try:
            look_up(f"{package}:{name}", folders)
        except ConfigError:
            continue
        return f"{package}:{name}"
    return None
