"""Names of the last version, which work for one more."""

from __future__ import annotations

import warnings


def warn_of_old_name(old: str, new: str) -> None:
    """Warn whoever uses ``old``: the caller of the function that calls this."""
    warnings.warn(
        f"{old} is called {new} now; the old name will be removed in the next version.",
        DeprecationWarning,
        stacklevel=3,
    )
