"""What an optimizer step, an evaluation and a checkpoint ask of a way of synchronising.

A step calls, in this order:

    sync = way.begin_step()                   # may wait for the other ranks
    with sync.microbatch(last=…, counts=…):   # around each forward and backward
        sync.sum(count)                       # after the first forward
        sync.begin_sum(sums)                  # after the last forward
        with sync.backward(last=…): …         # around each backward
    sync.finish()                             # gradients are those to update with
    sync.commit(applied=…)                    # after the update
    numbers = sync.end_step(numbers, …)       # may average models, or tune
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.rank_state import RankState
from paceline.checkpoint.saveable import Load, Saved
from paceline.sync.averaging import GradientAveraging
from paceline.sync.numbers import Numbers, Problem
from paceline.sync.traffic import Traffic


class StepSync(Protocol):
    """One step's way: with the other ranks, or of a replica by itself."""

    @property
    def alone(self) -> bool:
        """Whether this replica steps by itself: nothing in the step may wait for another rank."""

    @property
    def ranks(self) -> int:
        """How many ranks do this step together."""

    @property
    def replicas(self) -> int:
        """Over how many replicas gradients are averaged."""

    @property
    def compresses(self) -> bool:
        """Whether gradients travel in another form, which needs to know their unit."""

    @property
    def must_know_if_applied(self) -> bool:
        """Whether ``commit`` looks at ``applied``: with fp16, finding out makes a GPU wait."""

    def microbatch(self, *, last: bool, counts: bool) -> contextlib.AbstractContextManager[Any]:
        """Around one microbatch's forward and backward: ranks exchange gradients in the last."""

    def sum(self, values: Tensor) -> None:
        """Add ``values`` up over the ranks of this step, in place."""

    def begin_sum(self, values: Tensor) -> dist.Work | None:
        """As ``sum``, without waiting; ``None``: there is nothing to wait for."""

    def set_unit(self, unit: float) -> None:
        """The gradients to come are ``unit`` times those of the mean loss."""

    def backward(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Around one backward pass."""

    def finish(self) -> None:
        """Exchange what remains after the last backward."""

    def updates(self, samples: int) -> bool:
        """Whether a rank with so many samples of its own updates its parameters."""

    def commit(self, *, applied: bool) -> None:
        """The update is over; a step that was not ``applied`` counts as if nothing was sent."""

    def end_step(self, numbers: Numbers, problem: Problem | None, counted: Tensor) -> Numbers:
        """The step is done; ``counted`` are this rank's own items. Returns what to report."""


Merge = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Makes tensors of this rank's parameters whole, and adds those of other stages. A collective."""


class SyncState(Protocol):
    """What a way of synchronising adds to a checkpoint, and takes from it."""

    def shared(self, name: str, own: Tensor) -> Tensor:
        """What stands for a parameter or a buffer in the model that all replicas share."""

    @property
    def keeps_optimizer(self) -> bool:
        """Whether this rank has an optimizer state that no other rank has."""

    @property
    def optimizer_prefix(self) -> str:
        """Where this rank's optimizer state goes."""

    def optimizer_source(self, saved: Saved) -> str:
        """Where this rank finds an optimizer state."""

    def about(self) -> dict[str, Any]:
        """What the checkpoint says of it beside tensors."""

    def collect(self, state: RankState, buffers: Mapping[str, Tensor]) -> None:
        """Add this rank's tensors; ``buffers`` are the persistent ones of its model."""

    def load(
        self, saved: Saved, found: Mapping[str, Any], load: Load, buffers: Mapping[str, Tensor]
    ) -> None:
        """Go on as the checkpoint says, whose model and optimizer were loaded. A collective."""

    def whole(self, merge: Merge) -> dict[str, Any]:
        """For ``paceline.Engine.state_dict``. A collective."""

    def load_whole(self, state: Mapping[str, Any]) -> None:
        """Take over what ``whole`` gave."""


class Sync(Protocol):
    """A way of synchronising, for as long as an engine lives."""

    @property
    def state(self) -> SyncState:
        """Its part of checkpoints."""

    @property
    def is_synchronised(self) -> bool:
        """Whether all replicas have one model since the end of the last step."""

    @property
    def averaging(self) -> GradientAveraging | None:
        """What averages gradients, where DDP or FSDP do not by themselves."""

    def follow_freezing(self) -> None:
        """Other parameters are trained from now on."""

    def begin_step(self) -> StepSync:
        """A step begins: the way it goes."""

    def synchronise(self) -> bool:
        """Give all replicas one model now; whether that changed any. A collective."""

    def settle(self) -> None:
        """Wait for what is under way of the last step; raises where a replica had to stop."""

    def sync_buffers(self) -> None:
        """Give ranks equal buffers for an evaluation, where replicas do not differ anyway."""

    def shared_model(self) -> contextlib.AbstractContextManager[None]:
        """The model with what all replicas share, where they train alone; else as it is."""

    def model_replaced(self) -> None:
        """Another model was loaded: forget what belongs to the one before."""

    def traffic(self) -> Traffic | None:
        """Bytes of gradients sent so far; ``None`` where they are not counted."""

    def sent_in(self, step: int) -> str | None:
        """What is sent in step number ``step`` (from 1): see ``paceline.events.WireUsed``."""

    def take_notes(self) -> list[str]:
        """What there is to tell the user since this was last asked."""

    def close(self) -> None:
        """End its threads."""
