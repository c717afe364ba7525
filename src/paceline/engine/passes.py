"""The passes of a step over a share's microbatches: forward, backward, and evaluation."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.engine.batch import move, placeholder, split, split_into
from paceline.engine.checks import check_depends_on_parameters
from paceline.parallel import sync_batchnorm
from paceline.parallel.term import Term

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


class Sums(NamedTuple):
    """Loss sum, item count and sample count of a step: this rank's, and the world's."""

    local: Tensor
    world: Tensor
    divisor: Tensor  # what each part of the loss was divided by


class Evaluated(NamedTuple):
    """One evaluation microbatch: the batch on its device, its size, its loss and model output."""

    batch: Any
    samples: int
    term: Term


class Passes:
    """Takes one engine's microbatches through its model, as its layout wants it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def cut(self, batch: Any) -> list[Any]:
        """The share's microbatches; a pipeline wants a certain number of them at least."""
        engine = self.engine
        cut = split(batch, engine.options["microbatch"])
        if engine.layout.pp == 1:
            return cut
        wanted = engine.options.pipeline.microbatches_for(engine.layout.pp, len(cut))
        samples = engine._local.samples(batch)
        return split_into(batch, min(wanted, samples)) if samples else cut

    def parts(self, batch: Any) -> list[tuple[Any, int]]:
        """The share's microbatches, on the device, each with the items its loss averages over."""
        engine = self.engine
        return self._filled(batch, together=engine._has_sync_norm or engine.spread.lockstep)

    def _filled(self, batch: Any, *, together: bool) -> list[tuple[Any, int]]:
        """The microbatches; filled up without items to those that other ranks run ``together``."""
        engine = self.engine
        samples = engine._local.samples(batch)
        cut = self.cut(batch)
        items = [engine._local.items(part) if samples else 0 for part in cut]
        wanted = len(cut)
        if together and engine.layout.dp > 1:
            most = torch.tensor(wanted)
            with engine._pulse.during("waiting"):
                dist.all_reduce(most, dist.ReduceOp.MAX, group=engine.world.everyone.cpu_group)
            wanted = int(most)
        if engine.layout.pp > 1:
            wanted = engine.options.pipeline.microbatches_for(engine.layout.pp, wanted)
        missing = wanted - len(cut)
        cut, items = cut + cut[:1] * missing, items + [0] * missing
        dtype = engine._precision.batch_dtype
        return [(move(part, engine.device, dtype), n) for part, n in zip(cut, items, strict=True)]

    def accumulate(self, parts: list[tuple[Any, int]], samples: int) -> Sums:
        """Forward and backward over all microbatches; gradients end up averaged over the ranks.

        The gradient of the mean needs the count of the whole global batch, which a loss that
        counts tokens tells only after the last forward. So each part is divided by the global
        count of the first microbatches, which keeps it in range for fp16, and
        the engine multiplies by what is missing afterwards: one, where nothing accumulates.
        """
        engine = self.engine
        if engine.spread.pipeline is not None:
            return self._run_pipeline(parts, samples)
        local = torch.zeros(3, dtype=torch.float64, device=engine.device)
        local[2].fill_(samples)  # plain assignment would make the host wait for a GPU
        divisor = local[1]
        world, work = local, None
        for index, (part, items) in enumerate(parts):
            last = index == len(parts) - 1
            with self._reducing(last, counts=items > 0):
                engine._pulse.enter("forward")
                term = self._forward(part, items)
                check_depends_on_parameters(term.total)
                local[0] += term.total.detach().to(engine.device)
                local[1] += _on(term.count, engine.device)
                if index == 0:
                    divisor = self._counted(local)[1].clone()
                    if engine.world.size > 1:
                        with engine._pulse.during("waiting"):
                            dist.all_reduce(divisor)
                    divisor.masked_fill_(divisor == 0, 1)  # nothing but padding so far
                    self._begin_exchange(divisor, parts)
                if last and engine.world.size > 1:
                    world = self._counted(local).clone()
                    work = dist.all_reduce(world, async_op=True)  # hidden behind the backward
                    if self._needs_unit and engine.options["microbatch"] is not None:
                        work.wait()
                        self._tell_unit(world[1], divisor)
                loss = term.total * (engine.layout.dp / divisor).to(term.total)
                engine._pulse.enter("backward")
                self._backward(loss, work)
        if work is not None:
            engine._pulse.enter("waiting")
            work.wait()
        return Sums(local=local, world=world, divisor=divisor)

    def _begin_exchange(self, divisor: Tensor, parts: list[tuple[Any, int]]) -> None:
        """Tell the exchange of gradients what they are multiples of, as far as it is known.

        Units sharded by ``zero=2`` and up send gradients after every microbatch: they go by the
        items that the batch tells of. Others send after the last one, when all losses are known.
        """
        engine = self.engine
        if not self._needs_unit:
            return
        count = divisor.clone()
        if engine.options["microbatch"] is not None and engine.layout.zero > 1:
            count.fill_(sum(items for _, items in parts))
            dist.all_reduce(count)
        self._tell_unit(count, divisor)

    @property
    def _needs_unit(self) -> bool:
        """Gradients that travel as they are may be multiples of anything."""
        wiring = self.engine.wiring
        return wiring is not None and wiring.compresses

    def _tell_unit(self, count: Tensor, divisor: Tensor) -> None:
        """The gradients to come are those of a mean over ``count``, taken by ``divisor``."""
        engine = self.engine
        if engine.wiring is None or not engine.wiring.compresses:
            return
        scaler = engine._precision.scaler
        factor = float(count / divisor) or 1.0
        engine.wiring.begin(
            engine.steps_done, factor * (1 if scaler is None else scaler.get_scale())
        )

    def _counted(self, local: Tensor) -> Tensor:
        """This rank's sums, or zeros where another rank speaks for the same samples."""
        return local if self.engine.spread.counts else torch.zeros_like(local)

    def _run_pipeline(self, parts: list[tuple[Any, int]], samples: int) -> Sums:
        """All microbatches through the pipeline's schedule.

        Every stage needs the divisor before the first loss is known: here it is the items that the
        batch tells of, and what the loss counts beside them is made up for afterwards.
        """
        engine = self.engine
        pipeline = engine.spread.pipeline
        assert pipeline is not None
        local = torch.zeros(3, dtype=torch.float64, device=engine.device)
        divisor = local[1].clone()
        if engine.spread.counts:
            local[2].fill_(samples)
            divisor.fill_(sum(items for _, items in parts))
        engine._pulse.enter("waiting")
        dist.all_reduce(divisor)
        divisor.clamp_(min=1)
        self._tell_unit(divisor, divisor)
        scale = engine.layout.dp / divisor
        scaler = engine._precision.scaler
        terms = pipeline.step(parts, scale if scaler is None else scaler.scale(scale))
        for term in terms:
            if term is not None:
                local[0] += term.total
                local[1] += term.count
        world = self._counted(local).clone()
        dist.all_reduce(world)
        if engine.layout.zero == 0:
            self._tell_unit(world[1], divisor)
        return Sums(local=local, world=world, divisor=divisor)

    def _backward(self, loss: Tensor, work: dist.Work | None) -> None:
        engine = self.engine
        scaler = engine._precision.scaler
        ends_here = work is not None and engine.spread.is_plain  # DDP waits at the end of it
        own: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if engine.clock is not None and ends_here:
            own = engine.clock.own_gradients(engine._parameters)
        try:
            with own, engine.reducing.timing() if ends_here else contextlib.nullcontext():
                (loss if scaler is None else scaler.scale(loss)).backward()
        except BaseException:
            # A process group must not be destroyed around a collective that is under way: Gloo's
            # thread may wait for the interpreter lock while its destructor waits for the thread.
            if work is not None:
                with contextlib.suppress(RuntimeError):
                    work.wait()
            raise

    def _reducing(self, last: bool, counts: bool) -> contextlib.AbstractContextManager[Any]:
        """Only the last backward of a step communicates, where the layout allows it."""
        return self.engine.spread.reducing(last, counts)

    def _forward(self, part: Any, items: int) -> Term:
        engine = self.engine
        if items or not (engine._has_sync_norm or engine.spread.lockstep):
            return engine.spread(part, items)
        # The other ranks wait for this rank: show them a sample that does not count.
        with sync_batchnorm.not_counting(engine.model):
            term = engine.spread(placeholder(part), 1)
        return Term(term.total * 0, 0, None)

    def evaluate(self, batch: Any) -> list[Evaluated]:
        """See :meth:`paceline.Engine.evaluate`."""
        engine = self.engine
        parts = self._filled(batch, together=engine.spread.lockstep)
        if engine.spread.pipeline is not None:
            terms = engine.spread.pipeline.evaluate(parts)
        else:
            terms = [self._evaluate_part(part, items) for part, items in parts]
        if not engine.spread.counts:
            return []
        has_samples = engine._local.samples(batch) > 0
        results = []
        for part, (on_device, items), term in zip(self.cut(batch), parts, terms, strict=False):
            if not has_samples:
                break
            assert term is not None
            # Nothing but padding: metrics want the output, the loss is 0/0.
            kept = term if items else Term(torch.zeros(()), 0, term.output)
            results.append(Evaluated(on_device, engine._local.samples(part), kept))
        return results

    def _evaluate_part(self, part: Any, items: int) -> Term | None:
        engine = self.engine
        if not engine._local.samples(part):
            if not engine.spread.lockstep:
                return None
            part = placeholder(part)
        if engine.spread.lockstep:  # through the module that gathers parameters
            return engine.spread.plain(engine.spread(part, items or 1))
        with engine.spread.context():
            term: Term = engine._local(part, items or 1)
        return engine.spread.plain(term)


def _on(value: Tensor | int, device: torch.device) -> Tensor | int:
    return value.to(device) if isinstance(value, Tensor) else value
