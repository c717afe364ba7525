"""``deepspeed.ops.lion``: one Lion under both of its names."""

from paceline.compat.deepspeed.optimizers import Lion

FusedLion = DeepSpeedCPULion = Lion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
