"""``deepspeed.runtime.dataloader``."""

from paceline.compat.deepspeed.pipe import RepeatingLoader

__all__ = ["RepeatingLoader"]
