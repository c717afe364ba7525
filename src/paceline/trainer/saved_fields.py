"""Plain values that come from a checkpoint: the fields that are known, each of its own kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import CheckpointError

Fits = Callable[[Any], bool]
"""Whether a value may stand in a field."""


def known_fields(saved: Any, fields: Mapping[str, Fits], whose: str) -> dict[str, Any]:
    """The ``fields`` of what a checkpoint ``saved`` for ``whose``; one that is missing is left out.

    A checkpoint says what values are, never which attributes there are: a field that nobody knows,
    or a value of another kind, is refused.
    """
    if not isinstance(saved, Mapping):
        raise _unusable(whose, f"it is a {type(saved).__name__}, not a mapping")
    for name, value in saved.items():
        if name not in fields:
            raise _unusable(whose, f"there is no field {name!r}; known are {', '.join(fields)}")
        if not fields[name](value):
            kind = type(value).__name__
            raise _unusable(whose, f"{name} cannot be {value!r:.60} (of type {kind})")
    return dict(saved)


def is_number(value: Any) -> bool:
    """A number, whole or not; NaN and infinity are numbers here."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """A whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """A whole number, 0 or more."""
    return is_whole(value) and value >= 0


def is_metrics(value: Any) -> bool:
    """Numbers by name."""
    return isinstance(value, dict) and all(
        isinstance(name, str) and is_number(number) for name, number in value.items()
    )


def _unusable(whose: str, problem: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's state of the {whose} cannot be taken over: {problem}. It was written by "
        "another version of Paceline, or changed since: resume from another checkpoint."
    )
