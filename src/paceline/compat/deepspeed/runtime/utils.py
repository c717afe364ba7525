"""``deepspeed.runtime.utils``: ``see_memory_usage``."""

from __future__ import annotations

from paceline.compat.deepspeed.accelerator import get_accelerator
from paceline.compat.deepspeed.utils import log_dist

_GIB = 2**30


def see_memory_usage(message: str, force: bool = False) -> None:
    """With ``force``, log on rank 0 what this device holds and held at most."""
    if not force:
        return
    device = get_accelerator()
    held, most = device.memory_allocated() / _GIB, device.max_memory_allocated() / _GIB
    log_dist(f"{message}: {held:.2f} GiB allocated, {most:.2f} GiB at most", ranks=[0])
    device.reset_peak_memory_stats()


__all__ = ["see_memory_usage"]
