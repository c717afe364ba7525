"""DeepSpeed's learning-rate schedules, rate for rate, as schedulers of torch.

DeepSpeed counts from -1: the first update is done at the rate of iteration -1, the second at that
of 0. torch's ``last_epoch`` is one more than DeepSpeed's ``last_batch_iteration``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import TrainingError

Rates = float | Sequence[float]


class DeepSpeedSchedule(LRScheduler):
    """A schedule whose rate is a function of DeepSpeed's iteration alone."""

    @property
    def last_batch_iteration(self) -> int:
        """What DeepSpeed calls the place of a schedule: -1 before the first update."""
        return int(self.last_epoch) - 1

    def get_lr(self) -> list[Any]:  # torch 2.13 allows tensors in it, and 2.11 only numbers
        """The rate of every group now."""
        return self.rates(self.last_batch_iteration)

    def rates(self, iteration: int) -> list[float]:
        """The rate of every group at DeepSpeed's ``iteration``."""
        raise NotImplementedError

    def _each(self, value: Rates, name: str) -> list[float]:
        """One value for each group of the optimizer."""
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, list | tuple):
            return [float(value)] * groups  # type: ignore[arg-type]
        if len(value) != groups:
            raise TrainingError(
                f"{type(self).__name__}: {name} has {len(value)} values, and the optimizer "
                f"{groups} groups. Give one value, or one for each group."
            )
        return [float(one) for one in value]


class WarmupLR(DeepSpeedSchedule):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` in ``warmup_num_steps``, and there it stays."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self.optimizer = optimizer
        _check_warmup(self, warmup_num_steps, warmup_type)
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = self._each(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._each(warmup_max_lr, "warmup_max_lr")
        self.warmup_num_steps, self.warmup_type = max(2, warmup_num_steps), warmup_type
        super().__init__(optimizer)

    def rates(self, iteration: int) -> list[float]:
        """The rate of every group at DeepSpeed's ``iteration``."""
        if iteration < 0:
            return list(self.min_lrs)
        part = self._part(iteration)
        return [low + (high - low) * part for low, high in zip(self.min_lrs, self.max_lrs)]  # noqa: B905

    def _part(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            return _risen(iteration, self.warmup_num_steps, self.warmup_type)
        return 1.0


class WarmupDecayLR(WarmupLR):
    """``WarmupLR``, then a straight line down to ``warmup_min_lr`` by ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)

    def _part(self, iteration: int) -> float:
        warmup, total = self.warmup_num_steps, self.total_num_steps
        if iteration < warmup:
            return _risen(iteration, warmup, self.warmup_type)
        return max(0.0, (total - iteration) / max(1.0, total - warmup))


class WarmupCosineLR(DeepSpeedSchedule):
    """Up to each group's own rate, and then down along a cosine to ``cos_min_ratio`` of it."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
    ) -> None:
        _check_warmup(self, warmup_num_steps, warmup_type)
        self.total_num_steps, self.warmup_min_ratio = total_num_steps, warmup_min_ratio
        self.warmup_num_steps, self.cos_min_ratio = max(2, warmup_num_steps), cos_min_ratio
        self.warmup_type = warmup_type
        self.full_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer)

    def rates(self, iteration: int) -> list[float]:
        """The rate of every group at DeepSpeed's ``iteration``."""
        return [rate * self._part(iteration) for rate in self.full_lrs]

    def _part(self, iteration: int) -> float:
        if iteration < 0:
            return 0.0
        warmup = self.warmup_num_steps
        if iteration < warmup:
            risen = _risen(iteration, warmup, self.warmup_type)
            return self.warmup_min_ratio + risen * (1 - self.warmup_min_ratio)
        done = min(1.0, (iteration - warmup + 1) / max(1, self.total_num_steps - warmup))
        wave = (1 + math.cos(math.pi * done)) / 2
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * wave)


class LRRangeTest(DeepSpeedSchedule):
    """A rate that rises without end, to find the largest one that trains."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
    ) -> None:
        self.optimizer = optimizer
        _check_steps(self, "lr_range_test_step_size", lr_range_test_step_size)
        self.min_lrs = self._each(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer)

    def rates(self, iteration: int) -> list[float]:
        """The rate of every group at DeepSpeed's ``iteration``."""
        intervals = (iteration + 1) / self.step_size
        if self.staircase:
            intervals = math.floor(intervals)
        return [low * (1 + self.step_rate * intervals) for low in self.min_lrs]


class OneCycle(DeepSpeedSchedule):
    """One cycle of the rate, and of Adam's first beta against it; then a decay."""

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
    ) -> None:
        self.optimizer = optimizer
        _check_steps(self, "cycle_first_step_size", cycle_first_step_size)
        self.first = float(cycle_first_step_size)
        second = cycle_second_step_size
        self.second = self.first if second is None else float(second)
        self.first_stairs = cycle_first_stair_count
        stairs = cycle_second_stair_count
        self.second_stairs = self.first_stairs if stairs is None else stairs
        self.decay_step_size, self.decay_lr_rate = decay_step_size, decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.min_lrs = self._each(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._each(cycle_max_lr, "cycle_max_lr")
        # As in DeepSpeed: an optimizer without betas has no momentum that could be cycled.
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        self.min_moms = self._each(cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._each(cycle_max_mom, "cycle_max_mom")
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """The rate of every group now; sets the betas, which go with it."""
        iteration = self.last_batch_iteration
        if self.cycle_momentum:
            for group, beta in zip(self.optimizer.param_groups, self.momenta(iteration)):  # noqa: B905
                group["betas"] = (beta, 0.99)
        return self.rates(iteration)

    def rates(self, iteration: int) -> list[float]:
        """The rate of every group at DeepSpeed's ``iteration``."""
        if iteration < 0:
            return list(self.min_lrs)
        if iteration < self.first + self.second:
            part = self._part(iteration)
            return [low + (high - low) * part for low, high in zip(self.min_lrs, self.max_lrs)]  # noqa: B905
        if not self.decay_step_size or math.isclose(self.decay_lr_rate, 0):
            return list(self.min_lrs)
        decay = 1 + self.decay_lr_rate * self._intervals(iteration)
        return [low / decay for low in self.min_lrs]

    def momenta(self, iteration: int) -> list[float]:
        """The first beta of every group at DeepSpeed's ``iteration``."""
        if iteration < 0:
            return list(self.min_moms)
        if iteration < self.first + self.second:
            part = self._part(iteration)
            return [high - (high - low) * part for low, high in zip(self.min_moms, self.max_moms)]  # noqa: B905
        if not self.decay_step_size or math.isclose(self.decay_mom_rate, 0):
            return list(self.max_moms)
        growth = 1 + self.decay_mom_rate * self._intervals(iteration)
        return [high * growth for high in self.max_moms]

    def _intervals(self, iteration: int) -> float:
        return (iteration - (self.first + self.second) + 1) / self.decay_step_size

    def _part(self, iteration: int) -> float:
        """How far the cycle is up: 1 at its top."""
        total = self.first + self.second
        place = (iteration + 1) % total
        rising = place <= self.first
        part = place / self.first if rising else (total - place) / self.second
        stairs = self.first_stairs if rising else self.second_stairs
        return math.floor(part * stairs) / stairs if stairs > 0 else part


def _risen(iteration: int, steps: int, kind: str) -> float:
    """How much of the rise is done."""
    if kind == "log":
        return math.log(iteration + 1) / math.log(steps)
    return iteration / steps


def _check_warmup(schedule: Any, steps: Any, kind: str) -> None:
    if steps != 0:  # DeepSpeed takes it, as any number below two
        _check_steps(schedule, "warmup_num_steps", steps)
    if kind not in ("log", "linear"):
        raise TrainingError(
            f"{type(schedule).__name__}: warmup_type={kind!r} must be 'log' or 'linear'."
        )


def _check_steps(schedule: Any, name: str, steps: Any) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps <= 0:
        raise TrainingError(
            f"{type(schedule).__name__}: {name}={steps!r} must be a whole number of steps, 1 or "
            "more."
        )
