"""The sections that name something to import: alone, or as one of a list or mapping of them."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from paceline.config.fields import Args, ImportPath, MetricPath
from paceline.config.sections import Section


class Target(Section):
    """Something to import and call with keyword arguments."""

    target: ImportPath = Field(description="Import path, like 'package.module:Name'.")
    args: Args = Field(default={}, description="Keyword arguments it is called with.")


class _Listed(Section):
    """One of several; the import path alone may stand for it."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, data: Any) -> Any:
        return {"target": data} if isinstance(data, str) else data


class MetricTarget(_Listed):
    """A metric of the validation data."""

    target: MetricPath = Field(
        description="Import path of a function metric(output, target) or of a class to build one, "
        "or the name of a metric of torchmetrics, like MulticlassF1Score."
    )
    args: Args = Field(default={}, description="Keyword arguments of the function or class.")
    whole_set: bool = Field(
        default=False,
        description="Call the function once, with all outputs and targets in order, instead of "
        "on each batch.",
    )


class CallbackTarget(_Listed):
    """Code called during the run."""

    target: ImportPath = Field(
        description="Import path of a paceline.Callback class, or of a function that returns one."
    )
    args: Args = Field(default={}, description="Keyword arguments it is called with.")


class TrackerTarget(_Listed):
    """A tracker of one's own."""

    target: ImportPath = Field(
        description="Import path of a tracker class, or of a function that returns a tracker. One "
        "that takes run_dir is given the run's folder."
    )
    args: Args = Field(default={}, description="Keyword arguments it is called with.")


class CollateTarget(Target):
    """What makes a batch of a list of samples."""

    target: ImportPath = Field(
        description="Import path of a function collate(samples), or of a class to build one."
    )
