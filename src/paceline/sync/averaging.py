"""Averages gradients over data-parallel ranks where DDP and FSDP do not do it by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.layout import Layout
from paceline.options import Compression
from paceline.parallel.averaging import UnitParameter
from paceline.parallel.distributed_model import data_ranks
from paceline.parallel.dtensor import copies, cuts
from paceline.sync.compressed.ddp_hook import Hook
from paceline.sync.compressed.exchange import Exchange
from paceline.sync.compressed.scatter import CutParameter, Scatter
from paceline.sync.hierarchical import Hierarchical, Levels
from paceline.sync.wire import Wire
from paceline.world import World
from paceline.world.group import backend_by_device


class GradientAveraging:
    """One engine's exchange, in the shapes in which DDP, FSDP and others want to call it."""

    def __init__(
        self, compression: Compression, model: nn.Module, layout: Layout, world: World
    ) -> None:
        self._names = {id(p): name for name, p in model.named_parameters()}
        wire = _wire(layout, world)
        self.exchange = Exchange(compression, self._names, wire, whole=layout.tp == 1)
        self.exchange.embeddings = {
            self._names[id(parameter)]
            for module in model.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
            for parameter in module.parameters(recurse=False)
        }
        self._hook = Hook(self.exchange, world.device, waits=not _by_nccl(world))
        if self._hook.courier is not None:
            world.before_close(self._hook.courier.close)

    def know(self, held: Mapping[str, Sequence[nn.Parameter]], tied: Iterable[str]) -> None:
        """The parameters that this rank trains, once the model is spread.

        Copies of a weight, ``tied`` over pipeline stages or whole on all tensor-parallel ranks,
        must get equal gradients, whatever else travels with each of them.
        """
        exchange = self.exchange
        for name, own in held.items():
            for number, parameter in enumerate(own):
                known = name if number == 0 else f"{name} (copy {number})"
                self._names[id(parameter)] = known
                if name in tied:
                    exchange.left_plain.add(known)
                elif "tp" not in cuts(parameter) or copies(parameter) > 1:
                    exchange.alike.add(known)

    @property
    def compresses(self) -> bool:
        """Whether anything travels in another form than its own."""
        return self.exchange.options.formats is not None

    def go_by(self, levels: Levels | None) -> None:
        """Sum in two levels from now on, or in one ring."""
        before = self.exchange.wire
        wire = Wire(before.group) if levels is None else Hierarchical(before.group, levels)
        wire.sent = before.sent
        self.exchange.wire = wire

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
        cuts = [CutParameter(name, shape) for name, shape in parameters]
        return Scatter(self.exchange, cuts, slot).sum

    def forget(self) -> None:
        """What a step that failed half way has sent does not count."""
        self.exchange.settle(applied=False)

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


def group_for_gradients(world: World, ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """The process group by which gradients of ``ranks`` travel. Every rank asks for it.

    Where messages make the host wait, a thread of its own sends them.
    """
    if _by_nccl(world):
        return world.group(ranks).process_group
    made = world.background_group("gradients", ranks)
    return made if world.rank in ranks else None


def _wire(layout: Layout, world: World) -> Wire:
    """The wire between this rank's copies of the model."""
    if layout.dp == 1:
        return Wire(None)
    groups = {ranks: group_for_gradients(world, ranks) for ranks in data_ranks(world, layout)}
    return Wire(next(group for ranks, group in groups.items() if world.rank in ranks))


def _by_nccl(world: World) -> bool:
    """Whether gradients travel on streams of a GPU, and nothing makes the host wait."""
    group = world.everyone.process_group
    return group is not None and backend_by_device(group).get(world.device.type) == "nccl"
