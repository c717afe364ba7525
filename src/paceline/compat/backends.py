"""``--backend``: the libraries that a script may be written for, and what a rank does for each.

A rank's worker calls ``prepare_rank`` before the script starts. No torch here: the command line
reads the names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

BACKENDS: dict[str, str | None] = {
    "torch": None,
    "horovod": "paceline.compat.horovod.alias:prepare_rank",
    "tensorflow": "paceline.compat.tensorflow.cluster:prepare_rank",
}
"""By name, the function that makes a rank ready, as ``module:function``; ``None``: nothing to do.

It is imported on the rank alone, so that naming a backend needs none of its libraries.
"""

SCRIPT_CHECKS: dict[str, str] = {
    "tensorflow": "paceline.compat.tensorflow.script_check:check_script",
}
"""By name, what reads a script before any rank is started, and says why it cannot train."""

REQUIREMENTS: dict[str, str] = {
    "tensorflow": "paceline.compat.tensorflow.library:require_tensorflow",
}
"""By name, what raises where the machine that is to run the ranks lacks the library."""


def prepare_rank(name: str) -> None:
    """Make this process ready for a script that was written for the backend ``name``."""
    check_backend(name)
    place = BACKENDS[name]
    if place is None:
        return
    prepare: Callable[[], None] = _function(place)
    prepare()


def check_installed(name: str) -> None:
    """Raise ``MissingExtra`` where this machine lacks what the backend ``name`` needs."""
    if name in REQUIREMENTS:
        _function(REQUIREMENTS[name])()


def script_problem(name: str, script: Path) -> str | None:
    """Why ``script`` cannot train with the backend ``name``; ``None`` if nothing is known."""
    if name not in SCRIPT_CHECKS:
        return None
    check: Callable[[Path], str | None] = _function(SCRIPT_CHECKS[name])
    return check(script)


def _function(place: str) -> Callable[..., Any]:
    module, _, function = place.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def check_backend(name: str) -> None:
    """Refuse a name that is not in the table."""
    if name not in BACKENDS:
        raise ConfigError(
            f"--backend {name}: there is no such backend; use {', '.join(BACKENDS)}: the library "
            "that the script is written for"
        )
