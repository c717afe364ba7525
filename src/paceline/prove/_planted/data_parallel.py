"""Planted bugs in what data-parallel ranks, accumulation and the update do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.engine import Engine
from paceline.engine import engine as engine_module
from paceline.engine import step as step_module
from paceline.engine.batch import batch_size
from paceline.engine.context import StepContext
from paceline.engine.microbatches import Microbatches
from paceline.parallel import distributed_model
from paceline.parallel.dtensor import cuts, local
from paceline.prove.observed_run import tied
from paceline.prove.samples import swapped, take
from paceline.sync import replica as replica_module
from paceline.sync.replica import Replica
from paceline.sync.synchronous import SynchronousSGD
from paceline.world import World

Patching = contextlib.AbstractContextManager[None]


@contextlib.contextmanager
def wrapped(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """``owner.name`` replaced by what ``make`` makes of it."""
    with swapped(owner, name, make(getattr(owner, name))):
        yield


def on_last_rank(world: World) -> bool:
    """Whether this is the rank that the bug is on."""
    return world.rank == world.size - 1


@contextlib.contextmanager
def missing_all_reduce() -> Iterator[None]:
    """No gradient leaves its data-parallel rank."""

    def make(original: Any) -> Any:
        return lambda sync, *, last, counts: original(sync, last=False, counts=counts)

    # DDP averages in the last backward; where it has no part, it is done after it.
    with (
        wrapped(SynchronousSGD, "microbatch", make),
        swapped(distributed_model, "average_gradients", lambda *_: None),
    ):
        yield


def wrong_accumulation() -> Patching:
    """Gradients of microbatches are summed."""

    def make(original: Any) -> Any:
        # As if every microbatch were the whole batch: their gradients are added, not averaged.
        return lambda context, sync, sums: original(
            context, sync, sums._replace(divisor=sums.items)
        )

    return wrapped(step_module, "finish_gradients", make)


def _held(replica: Replica) -> list[nn.Parameter]:
    parameters = [p for own in replica.spread.held.values() for p in own]
    return [p for p in parameters if p.requires_grad]


def _by_reader(replica: Replica, values: Tensor) -> Tensor:
    """What each data-parallel rank has of ``values``, by its number; zeros add nothing."""
    table = values.new_zeros(replica.layout.dp, *values.shape)
    table[replica.coordinate.dp] = values
    dist.all_reduce(table)
    return table


@contextlib.contextmanager
def _before_average(change: Callable[[StepContext, Any, list[Tensor]], None]) -> Iterator[None]:
    """Each rank's own gradients go through ``change`` before they are averaged over the ranks."""

    def make(original: Any) -> Any:
        def changed(context: StepContext, sync: Any, sums: Any) -> Any:
            replica = context.replica
            if replica.spread.pipeline is not None:
                replica.spread.pipeline.sync_tied()
            own = []
            for parameter in _held(replica):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                own.append(local(parameter.grad).mul_(sums.factor))
            change(context, sums, own)
            for gradient in own:
                dist.all_reduce(gradient, group=replica.spread.data_group.process_group)
                gradient.div_(replica.layout.dp)
            with _tied_already(replica):
                return original(context, sync, sums._replace(divisor=sums.items))

        return changed

    with missing_all_reduce(), wrapped(step_module, "finish_gradients", make):
        yield


def _tied_already(replica: Replica) -> contextlib.AbstractContextManager[None]:
    pipeline = replica.spread.pipeline
    if pipeline is None:
        return contextlib.nullcontext()
    return swapped(pipeline, "sync_tied", lambda: None)


def unscaled_loss() -> Patching:
    """Each data-parallel rank averages over its own items."""

    def by_own_count(context: StepContext, sums: Any, own: list[Tensor]) -> None:
        replica = context.replica
        counted = sums.local if replica.spread.counts else torch.zeros_like(sums.local)
        totals, counts, _ = _by_reader(replica, counted).unbind(1)
        counts = counts.clamp(min=1)
        for gradient in own:
            gradient.mul_(sums.world[1] / (replica.layout.dp * counts[replica.coordinate.dp]))
        sums.world[0] = (totals / counts).mean() * sums.world[1]

    return _before_average(by_own_count)


def local_clip() -> Patching:
    """Each data-parallel rank clips its gradient before the average."""

    def clip(context: StepContext, sums: Any, own: list[Tensor]) -> None:
        replica, bound = context.replica, context.clip_norm
        assert bound is not None
        square = torch.zeros((), dtype=torch.float64)
        for parameter, gradient in zip(_held(replica), own, strict=True):
            counted = replica.coordinate.tp == 0 or "tp" in dict(cuts(parameter))
            if counted and not replica.spread.is_duplicate(parameter):
                square += gradient.double().square().sum()
        norm = _by_reader(replica, square)[replica.coordinate.dp].sqrt()
        for gradient in own:
            gradient.mul_((bound / (norm + 1e-6)).clamp(max=1.0))

    return _before_average(clip)


def skipped_microbatch() -> Patching:
    """The last microbatch with samples adds nothing."""

    def make(original: Any) -> Any:
        def changed(microbatches: Microbatches, batch: Any) -> Any:
            parts = original(microbatches, batch)
            full = [index for index, (_, items) in enumerate(parts) if items]
            if microbatches.replica.layout.pp == 1:
                return parts[:-1] if len(parts) > 1 else parts
            if len(full) > 1:  # a schedule needs its number of microbatches: this one is empty
                part, _ = parts[full[-1]]
                parts[full[-1]] = (part, 0)
            return parts

        return changed

    return wrapped(Microbatches, "of_step", make)


@contextlib.contextmanager
def stale_buffer() -> Iterator[None]:
    """The last rank keeps the buffers it had."""

    def make(original: Any) -> Any:
        def changed(engine: Engine, batch: Any) -> Any:
            before = {name: value.clone() for name, value in engine.model.named_buffers()}
            result = original(engine, batch)
            if on_last_rank(engine.world):
                for name, buffer in engine.model.named_buffers():
                    buffer.copy_(before[name])
            return result

        return changed

    with (
        wrapped(Engine, "step", make),
        swapped(replica_module, "sync_buffers", lambda model, group: None),
    ):
        yield


def double_sample() -> Patching:
    """The first data-parallel rank sees its first sample twice."""

    def make(original: Any) -> Any:
        def changed(engine: Engine, batch: Any) -> Any:
            samples = batch_size(batch)
            if engine.coordinate.dp == 0 and samples > 0:
                batch = take(batch, samples, [0, *range(samples)])
            return original(engine, batch)

        return changed

    return wrapped(Engine, "step", make)


def wrong_average() -> Patching:
    """Gradients are summed over the data-parallel ranks."""

    def make(original: Any) -> Any:
        def changed(context: StepContext, sync: Any, sums: Any) -> Any:
            for parameter in _held(context.replica):
                if parameter.grad is not None:
                    local(parameter.grad).mul_(context.replica.layout.dp)
            return original(context, sync, sums)

        return changed

    return wrapped(step_module, "finish_gradients", make)


def stale_parameter() -> Patching:
    """The last rank does not update what it holds."""

    def make(original: Any) -> Any:
        def changed(context: StepContext, sync: Any) -> Any:
            return None if on_last_rank(context.replica.world) else original(context, sync)

        return changed

    return wrapped(step_module, "update", make)


def stale_tied_weight() -> Patching:
    """The other names of a tied weight hold a frozen copy."""

    def make(original: Any) -> Any:
        def changed(model: nn.Module, *more: Any) -> Any:
            for group in tied(model):
                for name in group[1:]:
                    owner, _, last = name.rpartition(".")
                    module = model.get_submodule(owner)
                    copy = getattr(module, last).detach().clone()
                    setattr(module, last, nn.Parameter(copy, requires_grad=False))
            return original(model, *more)

        return changed

    return wrapped(engine_module, "build", make)
