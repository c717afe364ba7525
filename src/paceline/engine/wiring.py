"""How an engine's gradients travel between its data-parallel ranks, where not DDP's way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.compress.exchange import Exchange
from paceline.compress.hook import Hook
from paceline.compress.options import Compression
from paceline.compress.scatter import Cut, Scatter
from paceline.compress.wire import Wire
from paceline.layout import Layout
from paceline.parallel.exchanging import UnitParameter
from paceline.parallel.spread import data_ranks
from paceline.world import World
from paceline.world.group import backend_by_device


class Wiring:
    """One engine's exchange, in the shapes in which DDP, FSDP and others want to call it."""

    def __init__(
        self, compression: Compression, model: nn.Module, layout: Layout, world: World
    ) -> None:
        self._names = {id(p): name for name, p in model.named_parameters()}
        wire, waits = _wire(layout, world)
        self.exchange = Exchange(compression, self._names, wire, whole=layout.tp == 1)
        self.bucket_mib: float | None = None
        self._hook = Hook(self.exchange, world.device, waits=waits)
        # For each parameter, whatever its form: what a ring would send of it uncompressed.
        self.plain_bytes = 0.0

    def know(self, held: Mapping[str, Sequence[nn.Parameter]]) -> None:
        """The parameters that this rank trains, once the model is spread."""
        self._names.update({id(p): name for name, own in held.items() for p in own})

    @property
    def is_due(self) -> bool:
        """Whether steps before left something behind."""
        return bool(self.exchange.memory.residuals)

    def hook(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """For DDP."""
        return self._hook(bucket)

    def rewired(self) -> None:
        """The buckets are others from now on."""
        self.exchange.fold_kept()

    def average(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], slot: int
    ) -> None:
        """For layouts that DDP does not know."""
        self.exchange.average(parameters, gradients, slot)

    def scatter(self, parameters: Sequence[UnitParameter], slot: int) -> Callable[[Tensor], Tensor]:
        """For FSDP."""
        cuts = [Cut(name, shape) for name, shape in parameters]
        return Scatter(self.exchange, cuts, slot).sum

    def begin(self, step: int, unit: float) -> None:
        """A step begins, whose gradients are ``unit`` times those of the mean loss."""
        self.exchange.step, self.exchange.unit = step, unit

    def settle(self, *, applied: bool, trained: Iterable[tuple[str, nn.Parameter]]) -> None:
        """A step is over; ``trained`` are this rank's parameters, with their gradients."""
        unused = [name for name, parameter in trained if parameter.grad is None]
        self.exchange.settle(applied=applied, unused=unused)

    def close(self) -> None:
        """End its thread."""
        self._hook.close()


def _wire(layout: Layout, world: World) -> tuple[Wire, bool]:
    """The wire of this rank's copies of the model; and whether its messages make the host wait."""
    if layout.dp == 1:
        return Wire(None), True
    groups = {ranks: world.group(ranks) for ranks in data_ranks(world, layout)}
    own = next(ranks for ranks in groups if world.rank in ranks)
    process_group = groups[own].process_group
    assert process_group is not None
    if backend_by_device(process_group).get(world.device.type) == "nccl":
        return Wire(process_group), False
    for ranks in groups:  # every rank makes every group
        made = world.background_group("gradients", ranks)
        if ranks == own:
            process_group = made
    return Wire(process_group), True
