"""Models in a loop of the user's own: spread over the ranks, with hooks that average gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.engine.initial_weights import check_copies_are_equal, make_values, mark_as_spread
from paceline.errors import TrainingError
from paceline.layout import Layout
from paceline.nested import map_tensors
from paceline.options import EngineOptions
from paceline.parallel.apply_layout import apply_layout, shard_root
from paceline.parallel.meta import is_on_meta
from paceline.parallel.shard import Sharded
from paceline.world import World


class RankWeights(Protocol):
    """What this rank's gradients count for among those of all ranks."""

    def of_step(self) -> float:
        """In the sum over the ranks at the end of a step; they add up to 1."""

    def of_forward(self) -> float:
        """In the mean over the ranks, for what one forward leads to; 0: for nothing."""


@dataclass
class SpreadModel:
    """A model as a loop of the user's own has it."""

    model: nn.Module
    called: nn.Module
    """What to call: the model itself, or torch's DDP around it."""
    sharded: Sharded | None = None


def spread(
    model: nn.Module, layout: Layout, world: World, options: EngineOptions, weights: RankWeights
) -> SpreadModel:
    """Spread ``model`` over the ranks of ``layout``, data-parallel or sharded. A collective."""
    on_meta = is_on_meta(model)
    initial = options.initial_weights

    def materialise(root: nn.Module) -> None:
        own = options.init or getattr(model, "_init_weights", None)
        make_values(root, layout, world, own, initial_weights=initial)

    if not layout.zero and not on_meta:  # else what each rank keeps is put there
        model.to(world.device)
    made = SpreadModel(model, model)
    if layout.zero:
        made.sharded = shard_root(model, model, layout, world, options)
        mark_as_spread(model, layout)
        if on_meta:
            materialise(model)
        _drive(made.sharded, model, world, weights)
    elif any(p.requires_grad for p in model.parameters()):
        placed = apply_layout(
            model, model, layout, world, options, materialise=materialise if on_meta else None
        )
        made.called = placed.module
    elif on_meta:
        materialise(model)
    if initial == "own":
        held = {name: [parameter] for name, parameter in model.named_parameters()}
        check_copies_are_equal(held, model, world)
    if isinstance(made.called, DistributedDataParallel):
        # DDP compares a hook's annotations with classes, and ours are strings: a lambda has none.
        made.called.register_comm_hook(weights, lambda own, bucket: _average(own, bucket))
        _refuse_unfreezing(made.called)
        _leave_frozen_alone(made.called)
    elif not layout.zero:  # nothing to leave out, but the same loop is to run
        model.no_sync = contextlib.nullcontext  # type: ignore[assignment]
    return made


def _refuse_unfreezing(wrapped: DistributedDataParallel) -> None:
    """DDP averages the gradients of what required them when it was made, and of nothing else."""
    frozen = [(n, p) for n, p in wrapped.module.named_parameters() if not p.requires_grad]

    def check(module: nn.Module, args: Any) -> None:
        for name, parameter in frozen:
            if parameter.requires_grad:
                raise TrainingError(
                    f"{name} was unfrozen after prepare(): its gradients would not be averaged "
                    "over the ranks. Unfreeze it before prepare(), and let schedules decide when "
                    "it is trained, or use paceline.Engine, which follows it."
                )

    wrapped.register_forward_pre_hook(check)


def _leave_frozen_alone(wrapped: DistributedDataParallel) -> None:
    """Call a model without DDP while all of it is frozen, as a discriminator in its rival's turn.

    DDP would wait for a backward that never comes, and fail at the next forward.
    """
    by_ddp = wrapped.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if any(parameter.requires_grad for parameter in wrapped.module.parameters()):
            return by_ddp(*args, **kwargs)
        return wrapped.module(*args, **kwargs)

    wrapped.forward = forward  # type: ignore[method-assign]


def _drive(sharded: Sharded, model: nn.Module, world: World, weights: RankWeights) -> None:
    """Have the hooks of a sharded model do what ``paceline.Engine`` does around a step."""
    syncing = True
    parameters = list(model.parameters())
    trained = [p.requires_grad for p in parameters]

    def before(module: nn.Module, args: Any) -> None:
        nonlocal trained
        now = [p.requires_grad for p in parameters]
        if now != trained:
            trained = now
            sharded.follow_freezing()
        sharded.communicate(last=syncing, counts=weights.of_forward() > 0)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        # FSDP averages over the ranks; ranks that had more samples count for more.
        weight = weights.of_forward()
        if weight == 1:
            return None
        return map_tensors(
            output, lambda t: WeightedGradient.apply(t, weight) if t.requires_grad else t
        )

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        nonlocal syncing
        syncing = False
        try:
            yield
        finally:
            syncing = True

    model.register_forward_pre_hook(before, prepend=True)
    model.register_forward_hook(after)
    model.no_sync = no_sync  # type: ignore[assignment]


class WeightedGradient(torch.autograd.Function):
    """The same tensor; its gradient times a weight, and zero where that is zero."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: float) -> Tensor:
        """The tensor itself."""
        ctx.weight = weight
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        """Its gradient, weighed."""
        # A placeholder's gradient may be NaN, and NaN times zero is NaN.
        return (grads[0] * ctx.weight if ctx.weight else torch.zeros_like(grads[0])), None


def _average(weights: RankWeights, bucket: Any) -> torch.futures.Future[Tensor]:
    weight = weights.of_step()
    # A placeholder's gradient may be NaN, and NaN times zero is NaN.
    buffer = bucket.buffer().mul_(weight) if weight else bucket.buffer().zero_()
    future = dist.all_reduce(buffer, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])
