"""Testing on several ranks: live ranks in milliseconds, small models, faults, leak checks.

With pytest: mark a test ``@pytest.mark.world(2)`` and use the ``ranks`` fixture. Without:
:func:`run_ranks`, or a :class:`RankPool` of your own. Names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.testing.pool import RankPool as RankPool
    from paceline.testing.pool import run_ranks as run_ranks

_HOME = {
    "RankPool": "pool",
    "run_ranks": "pool",
}

__all__ = ["RankPool", "run_ranks"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'paceline.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"paceline.testing.{_HOME[name]}"), name)
    globals()[name] = value
    return value
