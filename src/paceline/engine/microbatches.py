"""A share's microbatches: how it is cut, and how their gradients add up to that of the mean.

The gradient of the mean over the global batch needs the count of the whole batch, which a loss that
counts tokens tells only after the last forward. So each part of the loss is divided by the global
count of the first microbatches, which keeps it in range for fp16, and the gradients are multiplied
by what is missing afterwards (``Sums.factor``): one, where nothing accumulates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.engine.batch import move, placeholder, split, split_into
from paceline.engine.checks import check_depends_on_parameters
from paceline.engine.logged import Key, StepLogs
from paceline.engine.loss import LossModule
from paceline.engine.precision import Precision
from paceline.engine.randomness import SampleNumbers
from paceline.engine.step_timing import StepClock
from paceline.log_values import recording
from paceline.options import Pipelining
from paceline.parallel import sync_batchnorm
from paceline.parallel.loss_term import Term
from paceline.sync.protocol import StepSync
from paceline.sync.replica import Replica

Microbatch = tuple[Any, int]
"""The samples on their device, and over how many items their loss is a mean."""


class Sums(NamedTuple):
    """Loss sum, item count and sample count of a step: this rank's, and those of all its ranks."""

    local: Tensor
    world: Tensor
    divisor: Tensor
    """What each part of the loss was divided by."""
    items: Tensor
    """The items of the whole batch, by which it should have been."""
    logged: Tensor | None = None
    """What was logged, summed over the ranks of the step as well; its names are ``keys``."""
    keys: Sequence[Key] = ()

    @property
    def factor(self) -> Tensor:
        """What the accumulated gradients have to be multiplied by."""
        return self.divisor / self.items


class Microbatches:
    """Cuts shares into microbatches and accumulates their gradients, as the layout wants it."""

    def __init__(
        self,
        replica: Replica,
        loss: LossModule,
        precision: Precision,
        *,
        most: int | None,
        pipelining: Pipelining,
        numbers: SampleNumbers,
    ) -> None:
        self.replica, self._loss, self._precision = replica, loss, precision
        self._most, self._pipelining = most, pipelining
        self._numbers = numbers
        self._evaluated = 0
        self.logs = StepLogs(replica)
        """What the model and the loss log."""

    # ------------------------------------------------------------------ cutting

    @property
    def accumulate(self) -> bool:
        """Whether a step may have several: then ``Sums.factor`` may differ from one."""
        return self._most is not None or self.replica.layout.pp > 1

    def cut(self, batch: Any) -> list[Any]:
        """The share's microbatches; a pipeline wants a certain number of them at least."""
        layout = self.replica.layout
        cut = split(batch, self._most)
        if layout.pp == 1:
            return cut
        wanted = self._pipelining.microbatches_for(layout.pp, len(cut))
        samples = self._loss.samples(batch)
        return split_into(batch, min(wanted, samples)) if samples else cut

    def of_step(self, batch: Any) -> list[Microbatch]:
        """The share's microbatches for a step."""
        self._evaluated = 0
        parts = self._filled(batch, together=self._in_lockstep)
        self._number_samples(batch, parts, "training", self.replica.steps_done)
        return parts

    def of_evaluation(self, batch: Any) -> list[Microbatch]:
        """The share's microbatches for an evaluation."""
        parts = self._filled(batch, together=self.replica.spread.lockstep)
        self._evaluated += 1
        step = self.replica.steps_done, self._evaluated
        self._number_samples(batch, parts, "evaluation", step)
        return parts

    def _number_samples(
        self, batch: Any, parts: list[Microbatch], purpose: str, step: int | tuple[int, int]
    ) -> None:
        """Say which samples of the global batch each part holds, for what is drawn for them."""
        randomness = self.replica.randomness
        if randomness is None or randomness.off:
            return
        numbers = self._numbers.of(batch, asks=purpose == "training")
        rows = [None] if numbers is None else self.cut(numbers)
        rows += rows[:1] * (len(parts) - len(rows))  # as the parts were filled up
        own = zip((part for part, _ in parts), rows, strict=False)
        randomness.begin(purpose, step, list(own))

    def _filled(self, batch: Any, *, together: bool) -> list[Microbatch]:
        """The microbatches; filled up without items to those that other ranks run ``together``."""
        replica = self.replica
        samples = self._loss.samples(batch)
        cut = self.cut(batch)
        items = [self._loss.items(part) if samples else 0 for part in cut]
        wanted = len(cut)
        if together and replica.layout.dp > 1:
            most = torch.tensor(wanted)
            with replica.pulse.during("waiting"):
                dist.all_reduce(most, dist.ReduceOp.MAX, group=replica.world.everyone.cpu_group)
            wanted = int(most)
        if replica.layout.pp > 1:
            wanted = self._pipelining.microbatches_for(replica.layout.pp, wanted)
        missing = wanted - len(cut)
        cut, items = cut + cut[:1] * missing, items + [0] * missing
        dtype = self._precision.batch_dtype
        return [(move(part, replica.device, dtype), n) for part, n in zip(cut, items, strict=True)]

    @property
    def _in_lockstep(self) -> bool:
        """Whether ranks must run equally many forwards: they compute parts of them together."""
        return self.replica.has_sync_norm or self.replica.spread.lockstep

    # ------------------------------------------------------------------ accumulating

    def accumulate_gradients(
        self, parts: list[Microbatch], samples: int, sync: StepSync, clock: StepClock | None
    ) -> Sums:
        """Forward and backward over all microbatches; see the module for how they are weighted."""
        replica = self.replica
        if replica.spread.pipeline is not None:
            return self._run_pipeline(parts, samples, sync)
        device, pulse = replica.device, replica.pulse
        local = torch.zeros(3, dtype=torch.float64, device=device)
        local[2].fill_(samples)  # plain assignment would make the host wait for a GPU
        divisor = local[1]
        world, work = local, None
        logged: Tensor | None = None
        keys: list[Key] = []
        for index, (part, items) in enumerate(parts):
            last = index == len(parts) - 1
            with sync.microbatch(last=last, counts=items > 0):
                pulse.enter("forward")
                term = self._forward(part, items)
                check_depends_on_parameters(term.total)
                local[0] += term.total.detach().to(device)
                local[1] += _on(term.count, device)
                if index == 0:
                    divisor = self._counted(local)[1].clone()
                    sync.sum(divisor)
                    divisor.masked_fill_(divisor == 0, 1)  # nothing but padding so far
                    self._tell_first_unit(divisor, parts, sync)
                if last and not sync.alone:
                    wire, keys = self.logs.pack(self._counted(local))
                    world, logged = wire[:3], wire[3:]
                if last and sync.ranks > 1:
                    if sync.alone:
                        wire = world = self._counted(local).clone()
                    work = sync.begin_sum(wire)  # hidden behind the backward
                    if sync.compresses and self._most is not None and work is not None:
                        work.wait()
                        self._tell_unit(world[1], divisor, sync)
                loss = term.total * (sync.replicas / divisor).to(term.total)
                pulse.enter("backward")
                self._backward(loss, work, sync, clock, last=last)
        if work is not None:
            pulse.enter("waiting")
            work.wait()
        count = world[1]
        if sync.alone:  # the loss counted nothing but padding: others may have more
            count = torch.where(count == 0, divisor, count)
        return Sums(local, world, divisor, count, logged, keys)

    def _forward(self, part: Any, items: int) -> Term:
        spread = self.replica.spread
        if items or not self._in_lockstep:
            with self.drawing(part), recording(self.logs, items):
                return spread(part, items)
        # The other ranks wait for this rank: show them a sample that does not count.
        one = placeholder(part)
        with sync_batchnorm.not_counting(self.replica.model), self.drawing(one, samples=1):
            term = spread(one, 1)
        return Term(term.total * 0, 0, None)

    @contextlib.contextmanager
    def drawing(self, part: Any, samples: int | None = None) -> Iterator[None]:
        """What is drawn inside is drawn for the samples of ``part``."""
        randomness = self.replica.randomness
        if randomness is None or randomness.off:
            yield
            return
        randomness.select(part, samples)
        try:
            yield
        finally:
            randomness.finish()

    def _backward(
        self,
        loss: Tensor,
        work: dist.Work | None,
        sync: StepSync,
        clock: StepClock | None,
        *,
        last: bool,
    ) -> None:
        scaler = self._precision.scaler
        own: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if clock is not None and work is not None and self.replica.spread.is_plain:
            own = clock.own_gradients(self.replica.parameters)  # DDP waits at the end of it
        try:
            with own, sync.backward(last=last):
                (loss if scaler is None else scaler.scale(loss)).backward()
        except BaseException:
            # A process group must not be destroyed around a collective that is under way: Gloo's
            # thread may wait for the interpreter lock while its destructor waits for the thread.
            if work is not None:
                with contextlib.suppress(RuntimeError):
                    work.wait()
            raise

    def _counted(self, local: Tensor) -> Tensor:
        """This rank's sums, or zeros where another rank speaks for the same samples."""
        return local if self.replica.spread.counts else torch.zeros_like(local)

    def _run_pipeline(self, parts: list[Microbatch], samples: int, sync: StepSync) -> Sums:
        """All microbatches through the pipeline's schedule.

        Every stage needs the divisor before the first loss is known: here it is the items that the
        batch tells of, and what the loss counts beside them is made up for afterwards.
        """
        replica = self.replica
        pipeline = replica.spread.pipeline
        assert pipeline is not None
        local = torch.zeros(3, dtype=torch.float64, device=replica.device)
        divisor = local[1].clone()
        if replica.spread.counts:
            local[2].fill_(samples)
            divisor.fill_(sum(items for _, items in parts))
        replica.pulse.enter("waiting")
        sync.sum(divisor)
        divisor.clamp_(min=1)
        self._tell_unit(divisor, divisor, sync)
        scale = sync.replicas / divisor
        scaler = self._precision.scaler
        terms = pipeline.step(parts, scale if scaler is None else scaler.scale(scale))
        for term in terms:
            if term is not None:
                local[0] += term.total
                local[1] += term.count
        wire, keys = self.logs.pack(self._counted(local))
        sync.sum(wire)
        world = wire[:3]
        if replica.layout.zero == 0:
            self._tell_unit(world[1], divisor, sync)
        return Sums(local, world, divisor, world[1], wire[3:], keys)

    # ------------------------------------------------------------------ units of what is sent

    def _tell_first_unit(self, divisor: Tensor, parts: list[Microbatch], sync: StepSync) -> None:
        """Tell the exchange of gradients what they are multiples of, as far as it is known.

        Units sharded by ``zero=2`` and up send gradients after every microbatch: they go by the
        items that the batch tells of. Others send after the last one, when all losses are known.
        """
        if not sync.compresses:
            return
        count = divisor.clone()
        if self._most is not None and self.replica.layout.zero > 1:
            count.fill_(sum(items for _, items in parts))
            dist.all_reduce(count)
        self._tell_unit(count, divisor, sync)

    def _tell_unit(self, count: Tensor, divisor: Tensor, sync: StepSync) -> None:
        """The gradients to come are those of a mean over ``count``, taken by ``divisor``."""
        if not sync.compresses:
            return
        scaler = self._precision.scaler
        factor = float(count / divisor) or 1.0
        sync.set_unit(factor * (1 if scaler is None else scaler.get_scale()))


def _on(value: Tensor | int, device: torch.device) -> Tensor | int:
    return value.to(device) if isinstance(value, Tensor) else value
