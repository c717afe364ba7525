"""Known bugs to plant into a layout's run, on its ranks only, to see the prover catch them.

Each replaces a piece of the engine while the run lasts; the engine itself knows nothing of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from paceline.engine import Engine
from paceline.engine import engine as engine_module
from paceline.engine.batch import batch_size
from paceline.prove.rehearsal import tied
from paceline.prove.samples import swapped, take

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Plant:
    """A bug: what it is in words, what it takes to show, and how to introduce it."""

    name: str
    words: str
    patch: Patch
    ranks: int = 1
    """How many data-parallel ranks it takes."""
    accumulation: bool = False
    clipping: bool = False
    uneven: bool = False
    """Whether shares of equal size hide it."""
    buffers: bool = False
    ties: bool = False


def planted(name: str | None) -> contextlib.AbstractContextManager[Any]:
    """The bug ``name`` at work in this process; nothing for ``None``."""
    return contextlib.nullcontext() if name is None else PLANTS[name].patch()


def _on_last_rank(engine: Engine) -> bool:
    return engine.world.rank == engine.world.size - 1


@contextlib.contextmanager
def _wrapped(name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """The engine's method ``name`` replaced by what ``make`` makes of it."""
    with swapped(Engine, name, make(getattr(Engine, name))):
        yield


def _missing_all_reduce() -> contextlib.AbstractContextManager[None]:
    def make(original: Any) -> Any:
        return lambda engine, last, counts: original(engine, False, counts)

    return _wrapped("_reducing", make)


def _wrong_accumulation() -> contextlib.AbstractContextManager[None]:
    def make(original: Any) -> Any:
        # As if every microbatch were the whole batch: their gradients are added, not averaged.
        return lambda engine, sums: original(engine, sums._replace(divisor=sums.world[1]))

    return _wrapped("_finish_gradients", make)


@contextlib.contextmanager
def _before_average(change: Callable[[Engine, Any, list[Tensor]], None]) -> Iterator[None]:
    """Each rank's own gradients go through ``change`` before they are averaged over the ranks."""

    def make(original: Any) -> Any:
        def changed(engine: Engine, sums: Any) -> Any:
            trained = [p for p in engine.model.parameters() if p.requires_grad]
            own = []
            for parameter in trained:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                own.append(parameter.grad.mul_(sums.divisor / sums.world[1]))
            change(engine, sums, own)
            for gradient in own:
                dist.all_reduce(gradient)
                gradient.div_(engine.world.size)
            return original(engine, sums._replace(divisor=sums.world[1]))

        return changed

    with _missing_all_reduce(), _wrapped("_finish_gradients", make):
        yield


def _unscaled_loss() -> contextlib.AbstractContextManager[None]:
    def by_own_count(engine: Engine, sums: Any, own: list[Tensor]) -> None:
        count = sums.local[1].clamp(min=1)
        for gradient in own:
            gradient.mul_(sums.world[1] / (engine.world.size * count))
        mean = sums.local[0] / count
        dist.all_reduce(mean)
        sums.world[0] = mean / engine.world.size * sums.world[1]

    return _before_average(by_own_count)


def _skipped_microbatch() -> contextlib.AbstractContextManager[None]:
    def make(original: Any) -> Any:
        def changed(engine: Engine, batch: Any) -> Any:
            parts = original(engine, batch)
            return parts[:-1] if len(parts) > 1 else parts

        return changed

    return _wrapped("_parts", make)


def _local_clip() -> contextlib.AbstractContextManager[None]:
    def clip(engine: Engine, sums: Any, own: list[Tensor]) -> None:
        bound = engine.options["clip_norm"]
        assert bound is not None
        clip_grads_with_norm_(engine.model.parameters(), bound, get_total_norm(own))

    return _before_average(clip)


@contextlib.contextmanager
def _stale_buffer() -> Iterator[None]:
    def make(original: Any) -> Any:
        def changed(engine: Engine, batch: Any) -> Any:
            before = [(buffer, buffer.clone()) for buffer in engine.model.buffers()]
            result = original(engine, batch)
            if _on_last_rank(engine):
                for buffer, value in before:
                    buffer.copy_(value)
            return result

        return changed

    with _wrapped("step", make), swapped(engine_module, "sync_buffers", lambda model, group: None):
        yield


def _double_sample() -> contextlib.AbstractContextManager[None]:
    def make(original: Any) -> Any:
        def changed(engine: Engine, batch: Any) -> Any:
            samples = batch_size(batch)
            if engine.world.rank == 0 and samples > 0:
                batch = take(batch, samples, [0, *range(samples)])
            return original(engine, batch)

        return changed

    return _wrapped("step", make)


def _wrong_average() -> contextlib.AbstractContextManager[None]:
    def make(original: Any) -> Any:
        def changed(engine: Engine, sums: Any) -> Any:
            for parameter in engine.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(engine.world.size)
            return original(engine, sums)

        return changed

    return _wrapped("_finish_gradients", make)


def _stale_parameter() -> contextlib.AbstractContextManager[None]:
    def make(original: Any) -> Any:
        return lambda engine: None if _on_last_rank(engine) else original(engine)

    return _wrapped("_update", make)


def _stale_tied_weight() -> contextlib.AbstractContextManager[None]:
    def make(original: Any) -> Any:
        def changed(engine: Engine, model: nn.Module, loss: Any, optimizer: Any) -> None:
            for group in tied(model):
                for name in group[1:]:
                    owner, _, last = name.rpartition(".")
                    module = model.get_submodule(owner)
                    copy = getattr(module, last).detach().clone()
                    setattr(module, last, nn.Parameter(copy, requires_grad=False))
            original(engine, model, loss, optimizer)

        return changed

    return _wrapped("_build", make)


PLANTS = {
    plant.name: plant
    for plant in (
        Plant(
            "missing-all-reduce",
            "each rank keeps its own gradient",
            _missing_all_reduce,
            ranks=2,
        ),
        Plant(
            "wrong-average",
            "gradients are summed over the ranks, not averaged",
            _wrong_average,
            ranks=2,
        ),
        Plant(
            "unscaled-loss",
            "each rank divides by its own count, not by the global one",
            _unscaled_loss,
            ranks=2,
            uneven=True,
        ),
        Plant(
            "wrong-accumulation",
            "gradients are summed over the microbatches, not averaged",
            _wrong_accumulation,
            accumulation=True,
        ),
        Plant(
            "skipped-microbatch",
            "the last microbatch of a step is left out",
            _skipped_microbatch,
            accumulation=True,
        ),
        Plant(
            "local-clip",
            "each rank clips its own gradient before the average",
            _local_clip,
            ranks=2,
            clipping=True,
        ),
        Plant("double-sample", "rank 0 counts its first sample twice", _double_sample),
        Plant("stale-parameter", "the last rank leaves out the update", _stale_parameter),
        Plant(
            "stale-buffer",
            "the last rank keeps its old buffers",
            _stale_buffer,
            buffers=True,
        ),
        Plant(
            "stale-tied-weight",
            "a tied weight is a copy that nobody updates",
            _stale_tied_weight,
            ties=True,
        ),
    )
}
"""Every bug that can be planted, by name."""
