"""The learning rate of each step, by a schedule of the user's or one of torch's."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import weakref
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.errors import CheckpointError, TrainingError
from paceline.options.checkpointing import direction
from paceline.schedules import SteppedSchedule, every

_SAID: weakref.WeakSet[LRScheduler] = weakref.WeakSet()


class LearningRate:
    """Drives a schedule: a function from the step to a factor, or one of torch's schedulers."""

    def __init__(self, optimizer: Optimizer, schedule: SteppedSchedule | None) -> None:
        self._optimizer = optimizer
        self._interval = "step" if schedule is None else schedule.interval
        self._metric = None if schedule is None else schedule.metric
        given = None if schedule is None else schedule.schedule
        self._scheduler = given if isinstance(given, LRScheduler) else None
        self._factor = given if self._scheduler is None else None
        self._epochs_done = 0
        # As torch's schedulers do: an optimizer that was scheduled before keeps its full rate.
        self._base = [g.setdefault("initial_lr", g["lr"]) for g in optimizer.param_groups]

    def set(self, steps_done: int) -> float:
        """Set the rates for the step after so many; the first group's."""
        groups = self._optimizer.param_groups
        if self._factor is not None:
            done = self._epochs_done if self._interval == "epoch" else steps_done
            factor = self._factor(done)
            if not isinstance(factor, int | float):
                raise TrainingError(
                    f"the schedule gave {factor!r} at {self._interval} {done}: it must return a "
                    "number, the factor on the learning rate."
                )
            for group in groups[len(self._base) :]:  # added since
                self._base.append(group.setdefault("initial_lr", group["lr"]))
            for group, base in zip(groups, self._base, strict=True):
                group["lr"] = base * factor
        return float(groups[0]["lr"])

    def step_done(self) -> None:
        """Let a scheduler that counts steps go on."""
        if self._scheduler is not None and self._interval == "step":
            self._scheduler.step()

    def epoch_done(self) -> None:
        """Let a schedule that counts epochs go on."""
        if self._interval == "epoch":
            self._epochs_done += 1
            if self._scheduler is not None:
                self._scheduler.step()

    @property
    def goes_by_metric(self) -> bool:
        """Whether it is to hear of evaluations."""
        return self._interval == "evaluation"

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Let a scheduler that goes by a metric see it."""
        assert isinstance(self._scheduler, ReduceLROnPlateau)
        assert self._metric is not None
        if self._metric not in metrics:
            raise TrainingError(
                f"ReduceLROnPlateau watches the metric {self._metric!r}, but the evaluation gave "
                f"{', '.join(metrics)}. Name one of them in every('evaluation', …, metric=)."
            )
        self._scheduler.step(metrics[self._metric])

    def state_dict(self) -> dict[str, Any] | None:
        """Where it is; a function of the step needs nothing."""
        counted = {} if self._interval == "step" else {"every": self._interval}
        if self._scheduler is not None:
            return {**self._scheduler.state_dict(), **counted}
        return {**counted, "epochs_done": self._epochs_done} if counted else None

    def load_state_dict(self, saved: Any) -> None:
        """Take over what ``state_dict`` gave."""
        if saved is None or (self._scheduler is None and self._interval == "step"):
            return
        check_is_mapping(saved)
        before = saved.get("every", "step")
        if before != self._interval:
            raise CheckpointError(
                f"the schedule of the checkpoint counted {before}s, and this one counts "
                f"{self._interval}s. Say every({before!r}, …) as in that run, or start a new run."
            )
        if self._scheduler is not None:
            load_schedule(self._scheduler, saved)
            return
        done = saved.get("epochs_done")
        if not isinstance(done, int) or isinstance(done, bool) or done < 0:
            raise CheckpointError(
                f"the saved state of the schedule has epochs_done={done!r:.60}, not a number of "
                "epochs. Use the schedule of that run, or resume from another checkpoint."
            )
        self._epochs_done = done


def resolve_schedule(schedule: Any, optimizer: Optimizer) -> SteppedSchedule | None:
    """``schedule`` with its scheduler made; refused where it would do nothing, or fail."""
    if schedule is None:
        return None
    given = schedule if isinstance(schedule, SteppedSchedule) else every("step", schedule)
    made = given.schedule
    if makes_scheduler(made) and isinstance(schedule, SteppedSchedule):
        arguments = dict(given.arguments)
        if made is ReduceLROnPlateau:
            arguments["mode"] = direction(
                given.metric, arguments.get("mode"), "every('evaluation', ReduceLROnPlateau)"
            )
        made = made(optimizer, **arguments)
        if not isinstance(made, LRScheduler):
            raise TrainingError(
                f"schedule: {given.schedule!r} made a {type(made).__name__}, not one of torch's "
                "schedulers. Return one, or take the step instead of the optimizer."
            )
    elif given.arguments:
        raise TrainingError(
            f"schedule: every(…, {', '.join(given.arguments)}=): arguments are for a scheduler "
            "class, and this schedule is made already. Give them where it is made."
        )
    given = dataclasses.replace(given, schedule=made, arguments={})
    _check(given, optimizer)
    return given


def _check(given: SteppedSchedule, optimizer: Optimizer) -> None:
    made, plateau = given.schedule, isinstance(given.schedule, ReduceLROnPlateau)
    if plateau and (given.interval != "evaluation" or given.metric is None):
        raise TrainingError(
            "ReduceLROnPlateau goes by a metric, once an evaluation: pass "
            "schedule=paceline.schedules.every('evaluation', ReduceLROnPlateau, metric='loss')."
        )
    if not plateau and (given.interval == "evaluation" or given.metric is not None):
        raise TrainingError(
            f"schedule: every({given.interval!r}, …, metric={given.metric!r}) is for "
            "ReduceLROnPlateau alone. Other schedules go by 'step' or 'epoch', without a metric."
        )
    if isinstance(made, LRScheduler):
        if made.optimizer is not optimizer:
            raise TrainingError(
                f"the schedule ({type(made).__name__}) belongs to another optimizer, so it "
                "would change nothing here. Make it from the optimizer that you pass."
            )
    elif not callable(made) or isinstance(made, type):
        raise TrainingError(
            f"schedule={made!r} must be a function from the step to a factor on the learning "
            "rate, or one of torch's schedulers."
        )


def makes_scheduler(given: Any) -> bool:
    """Whether it is a scheduler class, or a function of the ``optimizer``."""
    if inspect.isclass(given):
        return issubclass(given, LRScheduler)
    if not callable(given):
        return False
    try:
        return next(iter(inspect.signature(given).parameters), "") == "optimizer"
    except (TypeError, ValueError):
        return False


def say_what_it_counts(schedule: Any) -> None:
    """Of one of torch's schedulers nobody can see whether steps or epochs are meant: a line."""
    if not isinstance(schedule, LRScheduler) or schedule in _SAID:
        return
    _SAID.add(schedule)
    if not isinstance(schedule, ReduceLROnPlateau):
        name = type(schedule).__name__
        logging.getLogger("paceline").warning(
            f"schedule={name}(…) counts optimizer steps, not epochs. Say which is meant: "
            f"schedule=paceline.schedules.every('step', {name.lower()}) or every('epoch', …). "
            "The next version will ask for it."
        )


def torch_scheduler(schedule: Any) -> LRScheduler | None:
    """The scheduler of torch's that was passed as ``schedule``, if it was one."""
    inner = schedule.schedule if isinstance(schedule, SteppedSchedule) else schedule
    return inner if isinstance(inner, LRScheduler) else None


def check_is_mapping(saved: Any) -> None:
    """Refuse the saved state of a schedule that is none."""
    if not isinstance(saved, Mapping):
        raise CheckpointError(
            f"the saved state of the schedule is a {type(saved).__name__}, not a mapping: the "
            "checkpoint was changed since it was saved. Resume from another one."
        )


def load_schedule(schedule: LRScheduler, saved: Any) -> None:
    """Give one of torch's schedulers its saved state: the fields that it has, each of its kind.

    Torch itself would make an attribute of every key in the file.
    """
    own = schedule.state_dict()
    check_is_mapping(saved)
    taken = {name: value for name, value in saved.items() if name in own}
    for name, value in taken.items():
        known = own[name]
        numbers = isinstance(known, int | float) and isinstance(value, int | float)
        if not (numbers or known is None or value is None or isinstance(value, type(known))):
            raise CheckpointError(
                f"the saved state of the schedule ({type(schedule).__name__}) has {name}="
                f"{value!r:.60}, where this one has {known!r:.60}. Use the schedule of that run, "
                "or resume from another checkpoint."
            )
    schedule.load_state_dict({**own, **taken})
