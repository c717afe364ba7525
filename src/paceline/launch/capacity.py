"""How many ranks a machine can hold at all: asked before the first of them is started."""

from __future__ import annotations

import os

from paceline.errors import LaunchError

RANK_BYTES = 100 << 20
"""What a process that has imported torch needs for itself alone, rounded down."""


def check_nproc(nproc: object, memory: int | None = None) -> None:
    """Refuse a number of ranks that is none, or that cannot fit into this machine's ``memory``."""
    if not isinstance(nproc, int) or isinstance(nproc, bool) or nproc < 1:
        raise LaunchError(f"nproc={nproc!r} must be a whole number, 1 or more.")
    memory = _memory() if memory is None else memory
    most = max(1, memory // RANK_BYTES)
    if nproc > most:
        raise LaunchError(
            f"nproc={nproc}: a rank is a process of at least {RANK_BYTES >> 20} MiB, and this "
            f"machine has {memory / 2**30:.1f} GiB of memory, which holds {most} at most. Lower "
            "nproc, or use more machines."
        )


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
