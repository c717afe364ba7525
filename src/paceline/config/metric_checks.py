"""Metrics, and what watches them: early stopping and the best checkpoint."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from paceline.config.code import code_folders
from paceline.config.keys import nearest
from paceline.config.named_targets import torchmetrics_path
from paceline.config.schema import Config
from paceline.config.sources import Path
from paceline.config.targets import Callee
from paceline.options.checkpointing import is_loss


def metric_problems(config: Config, data: Callee) -> Iterator[tuple[Path, str]]:
    """Metrics that are not there, and ones that are watched without being measured."""
    yield from _torchmetrics(config)
    stopping, checkpoint = config.early_stopping, config.checkpoint
    watched: list[tuple[Path, str, bool]] = []
    if checkpoint.best is not None:
        # A config written out in full has a mode in any case: what counts is that somebody chose.
        mode = "mode" in checkpoint.model_fields_set
        watched.append((("checkpoint", "best"), checkpoint.best, mode))
    if stopping is not None:
        has_mode = stopping.mode is not None
        watched.append((("early_stopping", "metric"), stopping.metric, has_mode))
    measured = ["loss", *config.metrics]
    if config.ema.decay is not None and config.ema.evaluate:
        measured += [f"ema/{name}" for name in measured]
    for path, metric, has_mode in watched:
        told = f"{'.'.join(path)}={metric!r}"
        if config.data.val is None and data.kind == "class":
            yield (
                path,
                f"{told} needs validation data: set data.val, or let data.target be a function "
                "that returns (train, val)",
            )
        # One value of a metric with several, such as a collection: which, an evaluation shows.
        of_several = any(metric.startswith(f"{name}/") for name in measured[1:])
        if metric not in measured and not of_several:
            near = nearest(metric, measured[1:])
            hint = f"; did you mean {near!r}?" if near else ""
            yield path, f"{told} is not measured; the metrics are {', '.join(measured)}{hint}"
        elif not has_mode and not is_loss(metric):
            yield (
                path,
                f"{told}: is a larger value better, or a smaller one? Set {path[0]}.mode to max "
                "or min",
            )


def _torchmetrics(config: Config) -> Iterator[tuple[Path, str]]:
    for name, metric in config.metrics.items():
        if ":" in metric.target:
            continue
        path = ("metrics", name, "target")
        if importlib.util.find_spec("torchmetrics") is None:
            yield (
                path,
                f"metrics.{name}.target={metric.target} is a metric of torchmetrics, which is not "
                "installed; pip install 'paceline[torchmetrics]', or write an import path like "
                "'package.module:Name'",
            )
        elif torchmetrics_path(metric.target, code_folders(config)) is None:
            yield (
                path,
                f"metrics.{name}.target: torchmetrics has no {metric.target!r}; for a metric of "
                "your own write an import path like 'package.module:Name'",
            )
