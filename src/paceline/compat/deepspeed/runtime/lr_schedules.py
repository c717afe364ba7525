"""``deepspeed.runtime.lr_schedules``: the schedules, for scripts that make one themselves."""

from paceline.compat.deepspeed.schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
