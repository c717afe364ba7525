"""Naming values and places of a model to its user."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from paceline.parallel.pipeline.tracing import Name


def describe(name: Name | None, units: Sequence[str]) -> str:
    """A value's name in words."""
    if name is None:
        return "a value whose origin torch does not show"
    if name[0] == "param":
        return f"the parameter {name[1]!r}"
    if name[0] == "call":
        return f"an output of {units[name[1]]!r}"
    if name[0] == "arg":
        return f"an input of {units[name[1]]!r}"
    after = f"after {units[name[1] - 1]!r}" if name[1] else "before the first module"
    return f"a value computed {after}"


def where_in_model(frames: traceback.StackSummary | None = None) -> str:
    """The line of the model's code that is running, or that ``frames`` end in."""
    for frame in reversed(frames or traceback.extract_stack()):
        path = frame.filename.replace("\\", "/")
        if "/torch/" not in path and "/paceline/parallel/pipeline/" not in path:
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "unknown place"
