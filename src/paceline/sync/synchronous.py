"""Gradients averaged over the replicas in every step.

By DDP or FSDP themselves; where they are compressed, or summed in two levels, by
``GradientAveraging``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paceline.options import Compression, Reduction
from paceline.parallel.averaging import Averaging
from paceline.sync.averaging import GradientAveraging
from paceline.sync.numbers import Numbers, Problem
from paceline.sync.reduction import ReductionChoice
from paceline.sync.replica import Replica
from paceline.sync.synchronous_state import SynchronousState
from paceline.sync.traffic import Traffic


class SynchronousSGD:
    """See ``Sync`` and its ``StepSync``: this is both."""

    alone = False
    is_synchronised = True

    def __init__(
        self, replica: Replica, compression: Compression | None, reduction: Reduction
    ) -> None:
        self._replica, self._world = replica, replica.world
        self._compression = compression
        self.reduction = ReductionChoice(reduction, replica)
        self.state = SynchronousState(replica, self.reduction)
        self.ranks, self.replicas = replica.world.size, replica.layout.dp

    @property
    def averaging(self) -> GradientAveraging | None:
        """What averages gradients, where DDP or FSDP do not by themselves."""
        return self.reduction.averaging

    # ------------------------------------------------------------------ spreading

    def before_spreading(self) -> Averaging | None:
        """Form the groups that compressed gradients travel in."""
        if self._compression is not None:
            replica = self._replica
            self.reduction.averaging = GradientAveraging(
                self._compression, replica.model, replica.layout, replica.world
            )
        return self.averaging

    def after_spreading(self) -> None:
        """Learn which parameters this rank trains."""
        if self.averaging is not None:
            self.averaging.know(self._replica.spread.held, self._replica.spread.tied)

    def follow_freezing(self) -> None:
        """The layout has followed already."""

    # ------------------------------------------------------------------ a step

    def begin_step(self) -> SynchronousSGD:
        """Choose how to sum, before the first; share buffers."""
        self.reduction.begin_step()
        if self.averaging is not None:
            self.averaging.forget()
        self._replica.sync_buffers()
        return self

    def microbatch(self, *, last: bool, counts: bool) -> contextlib.AbstractContextManager[Any]:
        """Only the last backward of a step communicates, where the layout allows it."""
        return self._replica.spread.reducing(last, counts)

    def sum(self, values: Tensor) -> None:
        """Over the whole world."""
        if self.ranks > 1:
            with self._world.pulse.during("waiting"):
                dist.all_reduce(values)

    def begin_sum(self, values: Tensor) -> dist.Work | None:
        """Over the whole world."""
        return dist.all_reduce(values, async_op=True) if self.ranks > 1 else None

    @property
    def compresses(self) -> bool:
        """Gradients that travel as they are may be multiples of anything."""
        return self.averaging is not None and self.averaging.compresses

    def set_unit(self, unit: float) -> None:
        """Residuals are kept in units of the mean loss."""
        if self.averaging is not None:
            self.averaging.begin(self._replica.steps_done, unit)

    def backward(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """The backward in which DDP exchanges gradients is timed, where buckets are tuned."""
        if last and self.ranks > 1 and self._replica.spread.is_plain:
            return self.reduction.timing()
        return contextlib.nullcontext()

    def finish(self) -> None:
        """DDP is through with it; other layouts exchange now."""
        spread = self._replica.spread
        waits = contextlib.nullcontext() if spread.is_plain else self._world.pulse.during("waiting")
        with waits:
            spread.finish_gradients()

    def updates(self, samples: int) -> bool:
        """All of them: the gradient is that of the global batch."""
        return True

    @property
    def must_know_if_applied(self) -> bool:
        """Residuals of a step that was left out are those from before it."""
        return self.averaging is not None

    def commit(self, *, applied: bool) -> None:
        """Take over the residuals."""
        if self.averaging is not None:
            self.averaging.settle(applied=applied, trained=self._replica.trained())

    def end_step(self, numbers: Numbers, problem: Problem | None, counted: Tensor) -> Numbers:
        """Tune the buckets, once enough steps were timed."""
        numbers.note(problem)
        self.reduction.end_step()
        return numbers

    # ------------------------------------------------------------------ between steps

    def synchronise(self) -> bool:
        """They have one model all the time."""
        return False

    def settle(self) -> None:
        """Nothing is under way."""

    def sync_buffers(self) -> None:
        """Once a step is not enough: its forwards have changed them."""
        self._replica.sync_buffers()

    def shared_model(self) -> contextlib.AbstractContextManager[None]:
        """The model as it is."""
        return contextlib.nullcontext()

    def model_replaced(self) -> None:
        """Residuals are about the size of one step: they stay."""

    def traffic(self) -> Traffic | None:
        """DDP's and FSDP's own way is not counted."""
        if self.averaging is None:
            return None
        exchange = self.averaging.exchange
        return Traffic(round(exchange.wire.sent), round(exchange.plain))

    def sent_in(self, step: int) -> str | None:
        """See ``Sync``."""
        if self.averaging is None:
            return None
        return "warmup" if step <= self.averaging.exchange.options.warmup else "gradients"

    def take_notes(self) -> list[str]:
        """What was loaded, then what was chosen."""
        notes = self.state.notes + self.reduction.notes
        self.state.notes, self.reduction.notes = [], []
        return notes

    def close(self) -> None:
        """End the thread that carries gradients."""
        if self.averaging is not None:
            self.averaging.close()
