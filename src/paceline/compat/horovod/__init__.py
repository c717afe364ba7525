"""Horovod's interface on Paceline: ``import paceline.compat.horovod.torch as hvd``.

``paceline train --script old.py --backend horovod`` runs a script that imports ``horovod`` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__version__ = "0.28.1"
"""The version of Horovod whose interface this is."""


def run(func: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Call a function on several ranks of this machine: ``paceline.compat.horovod.runner.run``."""
    from paceline.compat.horovod import runner

    return runner.run(func, *args, **options)
