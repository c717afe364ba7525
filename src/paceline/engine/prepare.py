"""For people who keep their own ``loss.backward()`` loop: the parts, spread over the world."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Never

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.data import Loader, Share
from paceline.data import loader as make_loader
from paceline.engine.arguments import check_model
from paceline.engine.batch import batch_size, move, placeholder, split_into
from paceline.engine.checks import check_optimizer
from paceline.engine.initial_weights import (
    check_not_spread,
    start_from_one_model,
    start_from_one_optimizer,
)
from paceline.engine.optimizer_groups import Groups
from paceline.engine.own_loop import spread
from paceline.errors import DataError
from paceline.layout import Layout
from paceline.layout.batch import BatchSizes
from paceline.options import EngineOptions, Sharding
from paceline.options.arguments import refuse_unknown
from paceline.options.engine import InitialWeights
from paceline.options.rules import layout_in_world
from paceline.parallel.meta import Init
from paceline.parallel.replicate import sync_buffers
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
    prepared = None
    if loader is not None:
        sizes = BatchSizes(global_batch, per_device_batch, accumulate)
        prepared = PreparedLoader(_as_loader(loader, seed, layout, sizes), model, world)
    made = spread(model, layout, world, options, _ShareWeights(prepared, world.size))
    if made.sharded is not None:
        sharded = made.sharded
        held = {name: [parameter] for name, parameter in model.named_parameters()}
        groups.repoint(optimizer, held)
        optimizer.register_step_pre_hook(lambda *_: sharded.finish())
    return made.called, optimizer, prepared


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


class _ShareWeights:
    """This rank's part of the batch just drawn."""

    def __init__(self, loader: PreparedLoader | None, world_size: int) -> None:
        self._loader, self._world_size = loader, world_size

    def of_step(self) -> float:
        """See ``RankWeights``."""
        share = None if self._loader is None else self._loader.share
        return 1 / self._world_size if share is None else share.samples / share.global_samples

    def of_forward(self) -> float:
        """See ``RankWeights``."""
        return self.of_step() * self._world_size


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
