"""``--backend``: the libraries that a script may be written for, and what a rank does for each.

A rank's worker calls ``prepare_rank`` before the script starts. No torch here: the command line
reads the names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from paceline.errors import ConfigError

BACKENDS: dict[str, str | None] = {
    "torch": None,
    "horovod": "paceline.compat.horovod.alias:prepare_rank",
}
"""By name, the function that makes a rank ready, as ``module:function``; ``None``: nothing to do.

It is imported on the rank alone, so that naming a backend needs none of its libraries.
"""


def prepare_rank(name: str) -> None:
    """Make this process ready for a script that was written for the backend ``name``."""
    check_backend(name)
    place = BACKENDS[name]
    if place is None:
        return
    module, _, function = place.partition(":")
    prepare: Callable[[], None] = getattr(importlib.import_module(module), function)
    prepare()


def check_backend(name: str) -> None:
    """Refuse a name that is not in the table."""
    if name not in BACKENDS:
        raise ConfigError(
            f"--backend {name}: there is no such backend; use {', '.join(BACKENDS)}: the library "
            "that the script is written for"
        )
