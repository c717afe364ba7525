"""The learning rate as a function of the step and of the batch size: pure arithmetic, no torch."""

from __future__ import annotations

import math

from paceline.config.training import Schedule
from paceline.errors import ConfigError


def lr_factor(schedule: Schedule, step: int, total_steps: int | None) -> float:
    """What the full learning rate is multiplied by at ``step``, counted from 0.

    The first ``warmup_steps`` steps rise in equal parts, so that step ``warmup_steps - 1`` is the
    first at the full rate and no step has a rate of zero. From step ``warmup_steps`` to
    ``total_steps`` the factor goes from 1 to ``min_ratio`` along a line or half a cosine, and
    stays there. ``total_steps`` may be ``None`` (unknown) only for the constant schedule.
    """
    if step < 0:
        raise ConfigError(f"lr_factor: step={step} must be 0 or more; the first step is step 0.")
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.name == "constant":
        return 1.0
    if total_steps is None:
        raise ConfigError(
            f"schedule.name={schedule.name!r} must know how many steps the run has, and this data "
            "does not say how long an epoch is. Set train.steps, or schedule.name to 'constant'."
        )
    decay_steps = total_steps - schedule.warmup_steps
    done = min(1.0, (step - schedule.warmup_steps) / decay_steps) if decay_steps > 0 else 1.0
    left = 1.0 - done if schedule.name == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return schedule.min_ratio + (1.0 - schedule.min_ratio) * left


def scaled_lr(lr: float, rule: str, global_batch: int, reference_batch: int | None) -> float:
    """``lr``, chosen for ``reference_batch``, carried over to ``global_batch``.

    ``rule`` is ``none`` (unchanged), ``linear`` (times the ratio of the batches; Goyal et al. 2017)
    or ``sqrt`` (times its square root, which keeps the noise of Adam-like optimizers).
    """
    if rule == "none":
        return lr
    if rule not in ("linear", "sqrt"):
        raise ConfigError(f"schedule.lr_scaling must be one of none, linear, sqrt; got {rule!r}.")
    if reference_batch is None:
        raise ConfigError(
            f"schedule.lr_scaling={rule!r} needs schedule.reference_batch: the global batch that "
            f"optimizer.lr={lr:g} was chosen for."
        )
    ratio = global_batch / reference_batch
    return lr * (ratio if rule == "linear" else math.sqrt(ratio))
