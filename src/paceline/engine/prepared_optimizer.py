"""Optimizers and schedules in a loop of the user's own, which step where a step really ends."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.engine.accumulation import Accumulation
from paceline.engine.gradients import Gradients
from paceline.engine.loss_scale import AgreedScaler
from paceline.errors import TrainingError
from paceline.parallel.shard import Sharded
from paceline.world import World, collectives


class LoopState:
    """What optimizers, models and loaders of one loop have in common."""

    def __init__(self, world: World, passes: int) -> None:
        self.world = world
        self.by_hand = Accumulation(passes, world)
        """Counts passes for batches that come from no loader of ours."""
        self.accumulation = self.by_hand
        """That of the loader whose batch is being worked on."""
        self.scaler: AgreedScaler | None = None
        self.backwards = 0
        self._backward_in: tuple[int, int] | None = None
        self._unfinished: set[int] = set()
        self._scale_is_old = False

    # What this rank's gradients count for is in the loss, and ranks average them plainly. So their
    # number has to come in: with the loss, or afterwards with fp16, which is to overflow with the
    # same numbers as one process.

    @property
    def factor_before(self) -> int:
        """What losses are multiplied by beside their weight."""
        return 1 if self.scaler is not None else self.world.size

    @property
    def factor_after(self) -> int:
        """What gradients are multiplied by at the end of a step."""
        return self.world.size if self.scaler is not None else 1

    def of_step(self) -> float:
        """See ``RankWeights``."""
        return 1 / self.world.size if self.accumulation.counts_in_step else 0.0

    def of_forward(self) -> float:
        """See ``RankWeights``."""
        return 1.0 if self.accumulation.counts else 0.0

    def begin_backward(self, sharded: Sequence[Sharded]) -> None:
        """A backward is about to add to the gradients of these models."""
        if self.accumulation.begins_step:
            self.settle_scale()
        self.backwards += 1
        self._backward_in = self._now()
        self._unfinished.update(map(id, sharded))

    @property
    def has_no_gradients_yet(self) -> bool:
        """Whether the step under way has had no backward."""
        return self.accumulation.begins_step and self._backward_in != self._now()

    def _now(self) -> tuple[int, int]:
        return id(self.accumulation), self.accumulation.number

    def finish(self, sharded: Sharded) -> None:
        """Finish the gradients of a model, once for all of its optimizers. A collective."""
        if id(sharded) in self._unfinished:
            self._unfinished.remove(id(sharded))
            sharded.finish()

    def stepped(self) -> None:
        """An optimizer is through with its gradients: the scale may change before the next ones."""
        self._scale_is_old = True

    def settle_scale(self) -> None:
        """Let the scale follow the steps since. Not while gradients of the old scale are around."""
        if self.scaler is not None and self._scale_is_old:
            self.scaler.update()
        self._scale_is_old = False


class OptimizerControl:
    """Has ``step`` and ``zero_grad`` of an optimizer wait until a step has all of its passes."""

    def __init__(self, optimizer: Optimizer, sharded: Sequence[Sharded], loop: LoopState) -> None:
        self.optimizer, self._sharded, self._loop = optimizer, sharded, loop
        self.steps = 0
        """Steps so far, those that an overflow left out included."""
        self.updates = 0
        """Those that changed the parameters."""
        self.was_skipped = False
        """Whether the last step was left out, for an overflow."""
        self._backwards_seen = 0
        self._is_used_up = False
        self._is_finished = False
        self._step, self._zero_grad = optimizer.step, optimizer.zero_grad
        self._replace("step", self.step)
        self._replace("zero_grad", self.zero_grad)

    def _replace(self, name: str, by: Any) -> None:
        # torch's schedulers look for a mark on step; wraps takes it along.
        setattr(self.optimizer, name, functools.wraps(getattr(self.optimizer, name))(_call(by)))

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """All that it updates."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def finish(self) -> None:
        """Make the gradients those of the mean over the step: summed, without a scale. Once."""
        if self._is_finished:
            return
        self._is_finished = True
        for sharded in self._sharded:
            self._loop.finish(sharded)
        if self._loop.scaler is not None:
            self._loop.scaler.unscale_(self.optimizer)
        factor = self._loop.accumulation.correction() * self._loop.factor_after
        if factor != 1:
            gradients = Gradients(self.parameters, None, self._loop.world.device)
            gradients.scale(torch.tensor(factor, dtype=torch.float64))

    def step(self, closure: Any = None) -> Any:
        """``optimizer.step()``: does nothing before the last pass of a step."""
        loop = self._loop
        if not loop.accumulation.ends_step:
            return None
        if loop.backwards == self._backwards_seen:
            raise TrainingError(
                "optimizer.step(): there was no accelerator.backward(loss) since the last one. "
                "loss.backward() by itself knows neither the samples of the other ranks nor the "
                "scale of fp16; use accelerator.backward(loss)."
            )
        self.finish()
        self._backwards_seen, self._is_finished = loop.backwards, False
        self._is_used_up = True
        self.steps += 1
        self.was_skipped = loop.scaler is not None and loop.scaler.overflowed(self.optimizer)
        loop.stepped()
        if self.was_skipped:
            return None
        self.updates += 1
        return self._step() if closure is None else self._step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """``optimizer.zero_grad()``: leaves alone what passes of this step have added up."""
        loop = self._loop
        if self._is_used_up or loop.accumulation.passes == 1 or loop.has_no_gradients_yet:
            self._is_used_up = self._is_finished = False
            self._zero_grad(set_to_none=set_to_none)

    def went_on_from(self, steps: int) -> None:
        """A checkpoint of so many steps was loaded."""
        self.steps, self._is_finished, self._is_used_up = steps, False, False
        self._zero_grad()
        self._backwards_seen = self._loop.backwards


def _call(method: Any) -> Any:
    """``method`` as a plain function: a name can be put on those alone."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return call


class PreparedSchedule:
    """One of torch's schedulers; ``step`` does nothing until the optimizer has changed something.

    So it may be called after every batch, or after every epoch: what you write is what counts.
    """

    def __init__(self, schedule: LRScheduler, control: OptimizerControl) -> None:
        self.schedule, self._control = schedule, control
        self._updates_seen = control.updates

    def step(self, *args: Any, **kwargs: Any) -> None:
        """One step of the scheduler; one that goes by a metric takes rank 0's on all ranks."""
        if isinstance(self.schedule, ReduceLROnPlateau):
            args, kwargs = collectives.broadcast_object(_as_numbers((args, kwargs)))
        elif self._control.updates == self._updates_seen:
            return
        self._updates_seen = self._control.updates
        self.schedule.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """The rates by group."""
        return [float(rate) for rate in self.schedule.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        """That of the scheduler."""
        return self.schedule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        self.schedule.load_state_dict(state)
        self.went_on()

    def went_on(self) -> None:
        """It stands where a checkpoint was: the next step of the optimizer is its next one."""
        self._updates_seen = self._control.updates

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["schedule"], name)


def _as_numbers(given: Any) -> Any:
    args, kwargs = given
    return (
        tuple(float(a) if isinstance(a, torch.Tensor) else a for a in args),
        {n: float(a) if isinstance(a, torch.Tensor) else a for n, a in kwargs.items()},
    )
