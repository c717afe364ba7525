"""The learning rate that a config asks for: the schedules of ``paceline.schedules``."""

from __future__ import annotations

from typing import Any

import paceline.schedules as schedules
from paceline.config.training import Schedule
from paceline.errors import ConfigError


def lr_factor(schedule: Schedule, step: int, total_steps: int | None) -> float:
    """What the full learning rate is multiplied by at ``step``, counted from 0.

    ``total_steps`` may be ``None`` (unknown) only for the constant schedule.
    """
    shape: Any = schedule.name
    return schedules.factor(
        shape, step, total_steps, warmup=schedule.warmup_steps, min_ratio=schedule.min_ratio
    )


def scaled_lr(lr: float, rule: str, global_batch: int, reference_batch: int | None) -> float:
    """``lr``, chosen for ``reference_batch``, carried over to ``global_batch``."""
    if rule == "none":
        return lr
    if rule not in ("linear", "sqrt"):
        raise ConfigError(f"schedule.lr_scaling must be one of none, linear, sqrt; got {rule!r}.")
    if reference_batch is None:
        raise ConfigError(
            f"schedule.lr_scaling={rule!r} needs schedule.reference_batch: the global batch that "
            f"optimizer.lr={lr:g} was chosen for."
        )
    known: Any = rule
    return schedules.scaled_lr(
        lr, global_batch=global_batch, reference_batch=reference_batch, rule=known
    )
