"""Learning rates as functions of the step, as configs have them: pure arithmetic, no torch.

    schedule = paceline.schedules.cosine(epochs=90, warmup_epochs=5, steps_per_epoch=len(loader))
    paceline.Engine(model, ..., schedule=schedule)             # or Trainer
    torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)     # in a loop of your own, each step

A schedule gives, for each step (counted from 0), what the full learning rate is multiplied by.
Lengths are in steps, or in epochs together with ``steps_per_epoch``.

One of torch's schedulers comes with what it counts: ``every("epoch", StepLR, step_size=30)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from paceline.errors import ConfigError, TrainingError

Interval = Literal["step", "epoch", "evaluation"]
Shape = Literal["constant", "linear", "cosine"]
LRFactor = Callable[[int], float]
Scaling = Literal["none", "linear", "sqrt"]


def constant(
    *,
    warmup_steps: int | None = None,
    warmup_epochs: float | None = None,
    steps_per_epoch: int | None = None,
) -> LRFactor:
    """The full rate, after a linear rise to it."""
    warmup = _in_steps("warmup", warmup_steps, warmup_epochs, steps_per_epoch) or 0
    return lambda step: factor("constant", step, None, warmup=warmup)


def linear(
    steps: int | None = None,
    *,
    epochs: float | None = None,
    warmup_steps: int | None = None,
    warmup_epochs: float | None = None,
    steps_per_epoch: int | None = None,
    min_ratio: float = 0.0,
) -> LRFactor:
    """A linear rise, then a line down to ``min_ratio`` of the full rate after all ``steps``."""
    total = _total(steps, epochs, steps_per_epoch)
    warmup = _in_steps("warmup", warmup_steps, warmup_epochs, steps_per_epoch) or 0
    return lambda step: factor("linear", step, total, warmup=warmup, min_ratio=min_ratio)


def cosine(
    steps: int | None = None,
    *,
    epochs: float | None = None,
    warmup_steps: int | None = None,
    warmup_epochs: float | None = None,
    steps_per_epoch: int | None = None,
    min_ratio: float = 0.0,
) -> LRFactor:
    """A linear rise, then half a cosine down to ``min_ratio`` of the full rate after ``steps``."""
    total = _total(steps, epochs, steps_per_epoch)
    warmup = _in_steps("warmup", warmup_steps, warmup_epochs, steps_per_epoch) or 0
    return lambda step: factor("cosine", step, total, warmup=warmup, min_ratio=min_ratio)


def then(
    *schedules: LRFactor,
    at: int | Sequence[int] | None = None,
    at_epochs: float | Sequence[float] | None = None,
    steps_per_epoch: int | None = None,
) -> LRFactor:
    """Schedules one after the other, as ``SequentialLR`` has them: each counts from its own start.

        then(constant(warmup_steps=5), cosine(95), at=5)

    ``at`` says after how many steps each schedule but the first begins, ``at_epochs`` (together
    with ``steps_per_epoch``) after how many epochs.
    """
    starts: list[int] = []
    if at_epochs is None:
        starts += [] if at is None else [at] if isinstance(at, int) else at
    elif at is not None:
        raise ConfigError(f"then: at={at} and at_epochs={at_epochs} both say when: give one.")
    else:
        for epochs in [at_epochs] if isinstance(at_epochs, int | float) else at_epochs:
            starts.append(_in_steps("at", None, epochs, steps_per_epoch) or 0)
    if len(starts) != len(schedules) - 1:
        raise ConfigError(
            f"then: {len(schedules)} schedules need {max(len(schedules) - 1, 0)} starts, one for "
            f"each but the first; there are {len(starts)}. Give at= or at_epochs=."
        )
    if any(after <= before for before, after in zip([0, *starts], starts, strict=False)):
        raise ConfigError(f"then: the starts {starts} must rise, from 1 step up.")

    def joined(step: int) -> float:
        number = sum(start <= step for start in starts)
        return schedules[number](step - [0, *starts][number])

    return joined


@dataclass(frozen=True)
class SteppedSchedule:
    """A schedule and what it counts; made by ``every``."""

    interval: Interval
    schedule: Any
    metric: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


def every(
    interval: Interval, schedule: Any, *, metric: str | None = None, **arguments: Any
) -> SteppedSchedule:
    """Say what a schedule counts, for ``schedule=`` of ``Engine`` and ``Trainer``.

        every("step", OneCycleLR(optimizer, max_lr=0.1, total_steps=1000))
        every("epoch", StepLR, step_size=30)
        every("epoch", lambda epoch: 0.95**epoch)
        every("evaluation", ReduceLROnPlateau, metric="accuracy", mode="max")

    Args:
        interval: after what the schedule takes its next step: each optimizer ``step``, each
            ``epoch`` of the data, or for ``ReduceLROnPlateau`` each ``evaluation``.
        schedule: one of torch's schedulers; a scheduler class, or a function of the ``optimizer``
            that makes one; or a function from the number of steps or epochs so far to a factor on
            the learning rate.
        metric: what ``ReduceLROnPlateau`` goes by: a metric of the evaluation, such as ``loss``.
        arguments: those of a scheduler class, or of a function that makes a scheduler.
    """
    if interval not in get_args(Interval):
        raise TrainingError(
            f"every({interval!r}, …) must be 'step', 'epoch' or, for ReduceLROnPlateau, "
            "'evaluation'."
        )
    if isinstance(schedule, SteppedSchedule):
        raise TrainingError(
            f"every({interval!r}, …): the schedule is every({schedule.interval!r}, …) already. Say "
            "it once."
        )
    return SteppedSchedule(interval, schedule, metric, arguments)


def factor(
    shape: Shape, step: int, total: int | None, *, warmup: int = 0, min_ratio: float = 0.0
) -> float:
    """What the full learning rate is multiplied by at ``step``, counted from 0.

    The first ``warmup`` steps rise in equal parts, so that step ``warmup - 1`` is the first at the
    full rate and no step has a rate of zero. From step ``warmup`` to ``total`` the factor goes from
    1 to ``min_ratio``, and stays there. ``total`` may be ``None`` only where it is constant.
    """
    if step < 0:
        raise ConfigError(f"lr_factor: step={step} must be 0 or more; the first step is step 0.")
    if step < warmup:
        return (step + 1) / warmup
    if shape == "constant":
        return 1.0
    if total is None:
        raise ConfigError(
            f"schedule.name={shape!r} must know how many steps the run has, and this data "
            "does not say how long an epoch is. Set train.steps, or schedule.name to 'constant'."
        )
    decay_steps = total - warmup
    done = min(1.0, (step - warmup) / decay_steps) if decay_steps > 0 else 1.0
    left = 1.0 - done if shape == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return min_ratio + (1.0 - min_ratio) * left


def scaled_lr(
    lr: float, *, global_batch: int, reference_batch: int, rule: Scaling = "linear"
) -> float:
    """``lr``, chosen for ``reference_batch``, carried over to ``global_batch``.

    ``rule`` is ``linear`` (times the ratio of the batches; Goyal et al. 2017), ``sqrt`` (times its
    square root, which keeps the noise of Adam-like optimizers) or ``none``.
    """
    if rule not in ("none", "linear", "sqrt"):
        raise ConfigError(f"scaled_lr: rule={rule!r} must be one of none, linear, sqrt.")
    for name, size in (("global_batch", global_batch), ("reference_batch", reference_batch)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"scaled_lr: {name}={size!r} must be a whole number, 1 or more.")
    ratio = global_batch / reference_batch
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def _total(steps: int | None, epochs: float | None, steps_per_epoch: int | None) -> int:
    total = _in_steps("", steps, epochs, steps_per_epoch)
    if total is None:
        raise ConfigError(
            "the schedule must know its length: give steps, or epochs and steps_per_epoch."
        )
    return total


def _in_steps(
    what: str, steps: int | None, epochs: float | None, steps_per_epoch: int | None
) -> int | None:
    name = f"{what}_epochs" if what else "epochs"
    if epochs is None:
        return steps
    if steps is not None:
        raise ConfigError(f"{name}={epochs:g} and {steps} steps both say how long: give one.")
    if steps_per_epoch is None:
        raise ConfigError(
            f"{name}={epochs:g} needs steps_per_epoch, the optimizer steps of an epoch, such as "
            "len(loader)."
        )
    return round(epochs * steps_per_epoch)
