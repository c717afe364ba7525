"""Local SGD and DiLoCo: replicas train alone, and take an outer step together now and then."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paceline.options import LocalSteps
from paceline.sync.averaging import GradientAveraging
from paceline.sync.deferred_numbers import DeferredNumbers, DeferredQueue
from paceline.sync.local_sgd_state import LocalSgdState, Scaler
from paceline.sync.numbers import Numbers, Problem
from paceline.sync.outer_loop import OuterLoop
from paceline.sync.protocol import StepSync
from paceline.sync.replica import Replica
from paceline.sync.synchronous import SynchronousSGD
from paceline.sync.traffic import Traffic, plain_bytes


class LocalSGD:
    """See ``Sync`` and its ``StepSync``: this is both.

    Steps before ``options.start`` go by ``plain``. To be made once the model is spread; a
    collective.
    """

    alone = True
    ranks = replicas = 1
    compresses = must_know_if_applied = False

    def __init__(
        self,
        options: LocalSteps,
        replica: Replica,
        plain: SynchronousSGD,
        *,
        nonfinite: str,
        scaler: Scaler | None,
    ) -> None:
        self.options, self.plain = options, plain
        self._replica, self._world = replica, replica.world
        self._checks = nonfinite != "ignore"
        self.loop = OuterLoop(options, replica, checks=self._checks)
        self.state = LocalSgdState(self.loop, replica, plain.state, scaler)
        self.local_steps = 0
        """Steps that this replica has done by itself."""
        has_others = self.loop.wire.size > 1
        self._numbers = self._world.background_group("numbers") if has_others else None
        self._late = DeferredQueue(replica.device, stop=nonfinite == "stop")
        # Replicas leave at different times: what they are sending each other must arrive.
        self._world.before_close(self._late.finish)
        self._world.before_close(self.loop.courier.close)  # not the loop: it holds the model

    @property
    def averaging(self) -> GradientAveraging | None:
        """That of the steps before the first local one."""
        return self.plain.averaging

    @property
    def is_synchronised(self) -> bool:
        """Whether all replicas have one model since the end of the last step."""
        return self.loop.is_synchronised

    def follow_freezing(self) -> None:
        """Parameters that are trained from now on are shared, too."""
        self.loop.follow_freezing()

    # ------------------------------------------------------------------ a step

    def begin_step(self) -> StepSync:
        """Before ``options.start`` a plain step; then one that waits for no other replica."""
        if not self.options.is_alone(self._replica.steps_done):
            if self.loop.begun:  # a state from before the first round was loaded
                self.loop.forget()
            return self.plain.begin_step()
        if not self.loop.begun:
            self.loop.begin()
        self.loop.is_synchronised = False
        return self

    def microbatch(self, *, last: bool, counts: bool) -> contextlib.AbstractContextManager[Any]:
        """No backward communicates."""
        return self._replica.spread.reducing(last=False, counts=counts)

    def sum(self, values: Tensor) -> None:
        """This replica's own."""

    def begin_sum(self, values: Tensor) -> dist.Work | None:
        """This replica's own."""
        return None

    def set_unit(self, unit: float) -> None:
        """No gradient is sent."""

    def backward(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """As any other."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """The gradients are this replica's own."""
        self.plain.finish()

    def updates(self, samples: int) -> bool:
        """A replica whose share is empty leaves its parameters alone."""
        return samples > 0

    def commit(self, *, applied: bool) -> None:
        """Nothing was sent."""

    def end_step(self, numbers: Numbers, problem: Problem | None, counted: Tensor) -> Numbers:
        """Tell the others this step's numbers, and take an outer step where it is time to."""
        if problem is None:
            self.loop.count(counted)
        self.local_steps += 1
        step = self._replica.steps_done
        late = DeferredNumbers(
            step, numbers, problem, self._world, self._numbers, looks=self._checks
        )
        self._late.add(late)
        self.loop.apply_due()
        fragment = self.options.meeting(step)
        if fragment is not None:
            if not self.options.overlap:
                self.settle()  # a replica that has to stop does so before others apply anything
            self.loop.start(fragment, self.options.overlap)
        return late

    # ------------------------------------------------------------------ between steps

    def settle(self) -> None:
        """Wait until all replicas are through with the last step; raises where one had to stop."""
        self._late.settle()

    def synchronise(self) -> bool:
        """Let everything that has not taken an outer step at this step take one now."""
        if not self.loop.begun:
            return False
        self.settle()
        return self.loop.synchronise()

    def sync_buffers(self) -> None:
        """Replicas that train alone evaluate the shared model, with its own buffers."""
        if not self.loop.begun:
            self.plain.sync_buffers()

    def shared_model(self) -> contextlib.AbstractContextManager[None]:
        """The model as of the last outer step."""
        return self.loop.shared_model()

    def model_replaced(self) -> None:
        """The next step begins anew, from the model loaded."""
        self.loop.forget()

    def traffic(self) -> Traffic | None:
        """What plain steps sent, and what outer steps did."""
        sent = self.loop.wire.sent
        plain = self.local_steps * plain_bytes(self._replica)
        if self.averaging is not None:
            sent += self.averaging.exchange.wire.sent
            plain += self.averaging.exchange.plain
        return Traffic(round(sent), round(plain))

    def sent_in(self, step: int) -> str | None:
        """See ``Sync``."""
        return "distances" if self.options.is_alone(step - 1) else self.plain.sent_in(step)

    def take_notes(self) -> list[str]:
        """What was loaded, then what was chosen."""
        notes, self.state.notes = self.state.notes, []
        return notes + self.plain.take_notes()

    def close(self) -> None:
        """End the threads, after what is under way."""
        self.plain.close()
        self.loop.close()
