"""``deepspeed.runtime``: the modules of it that scripts import from."""

from paceline.compat.deepspeed.runtime import dataloader, lr_schedules, utils

__all__ = ["dataloader", "lr_schedules", "utils"]
