"""For people who keep their own ``loss.backward()`` loop: the parts, spread over the world."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Never

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.data import Loader, Share
from paceline.data import loader as make_loader
from paceline.engine.arguments import check_model
from paceline.engine.batch import batch_size, move, placeholder, split_into
from paceline.engine.checks import check_optimizer
from paceline.engine.initial_weights import (
    check_copies_are_equal,
    check_not_spread,
    make_values,
    mark_as_spread,
    start_from_one_model,
    start_from_one_optimizer,
)
from paceline.engine.optimizer_groups import Groups
from paceline.errors import DataError, TrainingError
from paceline.layout import Layout
from paceline.layout.batch import BatchSizes
from paceline.nested import map_tensors
from paceline.options import EngineOptions, Sharding
from paceline.options.arguments import refuse_unknown
from paceline.options.engine import InitialWeights
from paceline.options.rules import layout_in_world
from paceline.parallel.apply_layout import apply_layout, shard_root
from paceline.parallel.meta import Init, is_on_meta
from paceline.parallel.replicate import sync_buffers
from paceline.parallel.shard import Sharded
from paceline.world import World


def prepare(
    model: nn.Module,
    optimizer: Optimizer,
    loader: Loader | DataLoader[Any] | None = None,
    *,
    layout: str | Layout = "auto",
    seed: int = 0,
    sharding: Sharding | None = None,
    global_batch: int | None = None,
    per_device_batch: int | None = None,
    accumulate: int | None = None,
    initial_weights: InitialWeights = "rank0",
    init: Init | None = None,
    **unknown: Never,
) -> tuple[nn.Module, Optimizer, PreparedLoader | None]:
    """Spread ``model`` and ``loader`` over the world; train them by your own loop.

    The returned model averages its gradients over the ranks during ``backward()``, weighted by
    how many samples each rank had, so with a loss that is a mean over samples the gradient is that
    of the global batch, the short last one included. Use ``model.no_sync()`` around the backwards
    of an accumulation but the last; there the weights are those of the last batch.

    With ``zero=1``, ``2`` or ``3`` in the layout (``sharding`` says how) the model is sharded in
    place: its parameters, and the optimizer's, become parts (DTensors), which torch's optimizers
    and ``clip_grad_norm_`` work with.

    The returned loader yields this rank's share of each global batch, on its device. A torch
    ``DataLoader``'s batch size is taken as the *global* batch, or with ``per_device_batch`` as that
    of each data-parallel rank. ``seed`` orders its samples. With ``accumulate`` the loader yields
    each share in that many parts: see ``PreparedLoader``.

    All ranks start from the parameters and buffers that rank 0 has built; with
    ``initial_weights="own"`` every rank keeps its own. A model from the meta device gets its values
    by ``init(module)``, as with ``paceline.Engine``.

    Clipping, precision and loss averaging stay yours: ``paceline.Engine`` does them for you.
    """
    refuse_unknown(prepare, unknown)
    check_model(model)
    world = World.current()
    options = EngineOptions.of(
        layout=layout, sharding=sharding, initial_weights=initial_weights, init=init
    )
    layout = layout_in_world(options, world.size, own_loop=True)
    check_optimizer(optimizer, model)
    check_not_spread(model)
    start_from_one_model(
        model,
        world,
        initial_weights=initial_weights,
        settings={"layout": str(layout), "initial_weights": initial_weights},
    )
    start_from_one_optimizer(optimizer, model, world)
    groups = Groups(optimizer, model)
    on_meta = is_on_meta(model)
    if not layout.zero and not on_meta:  # else what each rank keeps is put there
        model.to(world.device)

    def materialise(root: nn.Module) -> None:
        own = init or getattr(model, "_init_weights", None)
        make_values(root, layout, world, own, initial_weights=initial_weights)

    prepared = None
    if loader is not None:
        sizes = BatchSizes(global_batch, per_device_batch, accumulate)
        prepared = PreparedLoader(_as_loader(loader, seed, layout, sizes), model, world)
    if layout.zero:
        sharded = shard_root(model, model, layout, world, options)
        mark_as_spread(model, layout)
        if on_meta:
            materialise(model)
        held = {name: [parameter] for name, parameter in model.named_parameters()}
        groups.repoint(optimizer, held)
        _drive(sharded, model, optimizer, world, prepared)
        wrapped = model
    else:
        placed = apply_layout(
            model, model, layout, world, options, materialise=materialise if on_meta else None
        )
        held, wrapped = placed.held, placed.module
    if initial_weights == "own":
        check_copies_are_equal(held, model, world)
    if isinstance(wrapped, DistributedDataParallel):
        # DDP compares a hook's annotations with classes, and ours are strings: a lambda has none.
        wrapped.register_comm_hook(
            _Weights(prepared, world.size), lambda weights, bucket: _average(weights, bucket)
        )
        _refuse_unfreezing(wrapped)
    elif not layout.zero:  # one process: nothing to leave out, but the same loop is to run
        model.no_sync = contextlib.nullcontext  # type: ignore[assignment]
    return wrapped, optimizer, prepared


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


def _drive(
    sharded: Sharded,
    model: nn.Module,
    optimizer: Optimizer,
    world: World,
    loader: PreparedLoader | None,
) -> None:
    """Have the hooks of a sharded model do what ``paceline.Engine`` does around a step."""
    weights = _Weights(loader, world.size)
    syncing = True
    parameters = list(model.parameters())
    trained = [p.requires_grad for p in parameters]

    def before(module: nn.Module, args: Any) -> None:
        nonlocal trained
        now = [p.requires_grad for p in parameters]
        if now != trained:
            trained = now
            sharded.follow_freezing()
        sharded.communicate(last=syncing, counts=weights.own() > 0)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        # FSDP averages over the ranks; ranks that had more samples count for more.
        weight = weights.own() * world.size
        return map_tensors(output, lambda t: _Weighted.apply(t, weight) if t.requires_grad else t)

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
    optimizer.register_step_pre_hook(lambda *_: sharded.finish())


class _Weighted(torch.autograd.Function):
    """The same tensor; its gradient times a weight."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        # A placeholder's gradient may be NaN, and NaN times zero is NaN.
        return (grads[0] * ctx.weight if ctx.weight else torch.zeros_like(grads[0])), None


class PreparedLoader:
    """A loader for a hand-written loop: batches on the device, never without a sample.

    With ``accumulate`` parts to a step, multiply each loss by ``weight``, have all backwards
    but that of the part which ``ends_step`` under ``model.no_sync()``, and step the optimizer
    after that one: the gradient is that of the mean over the global batch.
    """

    def __init__(self, loader: Loader, model: nn.Module, world: World) -> None:
        self.loader = loader
        self.weight = 1.0
        """What the loss of the part last yielded counts for in that of this rank's share."""
        self.ends_step = True
        """Whether the part last yielded is the last one of its global batch."""
        self._model = model
        self._world = world
        loader.expect_all_ranks()

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if self._world.size > 1:
                sync_buffers(self._model, self._world.everyone)
            # A rank without samples still has to run its backward: it gets one sample of zeros,
            # whose gradient counts for nothing.
            samples = batch_size(batch)
            own = batch if samples else placeholder(batch)
            passes = self.accumulate
            parts = split_into(own, min(passes, max(samples, 1))) if passes > 1 else [own]
            # Every rank runs as many backwards: the first part again, which counts for nothing.
            missing = passes - len(parts)
            sizes = [batch_size(part) for part in parts]
            weights = [size / sum(sizes) for size in sizes] + [0.0] * missing
            for index, part in enumerate(parts + parts[:1] * missing):
                self.weight, self.ends_step = weights[index], index == passes - 1
                yield move(part, self._world.device)

    def __len__(self) -> int:
        return len(self.loader) * self.accumulate

    @property
    def accumulate(self) -> int:
        """In how many parts each share of a global batch comes."""
        return self.loader.passes

    @property
    def share(self) -> Share | None:
        """How many samples of the last global batch this rank had, and how many there were."""
        return self.loader.share

    def state_dict(self) -> dict[str, Any]:
        """The position in the global order."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position."""
        self.loader.load_state_dict(state)


class _Weights:
    """What the gradient hook needs to know: this rank's part of the batch just drawn."""

    def __init__(self, loader: PreparedLoader | None, world_size: int) -> None:
        self.loader = loader
        self.world_size = world_size

    def own(self) -> float:
        share = None if self.loader is None else self.loader.share
        return 1 / self.world_size if share is None else share.samples / share.global_samples


def _average(weights: _Weights, bucket: Any) -> torch.futures.Future[Tensor]:
    weight = weights.own()
    # A placeholder's gradient may be NaN, and NaN times zero is NaN.
    buffer = bucket.buffer().mul_(weight) if weight else bucket.buffer().zero_()
    future = dist.all_reduce(buffer, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def _as_loader(
    data: Loader | DataLoader[Any], seed: int, layout: Layout, sizes: BatchSizes
) -> Loader:
    if isinstance(data, Loader):
        data.follow(layout)
        _check_sizes(data, sizes, layout)
        return data
    if isinstance(data, DataLoader):
        return make_loader(data, seed=seed, layout=layout, **sizes.stated())
    raise DataError(
        f"loader must come from paceline.loader(...) or be a torch DataLoader, not "
        f"{type(data).__name__}."
    )


def _check_sizes(loader: Loader, sizes: BatchSizes, layout: Layout) -> None:
    """A loader has its own sizes: what is said here may only repeat them."""
    if not any(sizes.stated().values()):
        return
    own = BatchSizes(loader.global_batch, microbatch=loader.microbatch)
    said = replace(sizes, global_batch=sizes.global_batch or own.global_batch).on(layout.dp)
    if said.global_batch != own.global_batch or said.microbatch not in (None, own.microbatch):
        told = ", ".join(f"{name}={value}" for name, value in sizes.stated().items() if value)
        raise DataError(
            f"prepare({told}): the loader already has global_batch={own.global_batch}"
            f"{'' if own.microbatch is None else f' in passes of {own.microbatch}'} on each rank's "
            f"share. Say it to paceline.loader(...) alone."
        )
