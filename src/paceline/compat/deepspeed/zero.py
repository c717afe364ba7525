"""``deepspeed.zero``: making a model for stage 3, and looking at its whole parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils import swap_tensors

from paceline.checkpoint.rank_state import held_part
from paceline.errors import TrainingError
from paceline.parallel.dtensor import local
from paceline.world import World


class Init(contextlib.AbstractContextManager["Init"]):
    """A model that is made inside is as it is without: ``initialize`` shards it.

    Every rank makes the whole model once, in the memory of the CPU. For a model that is larger
    than that, make it on the meta device and use ``paceline.Engine(init=…)``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("remote_device") == "nvme":
            raise TrainingError(
                "zero.Init(remote_device='nvme'): nothing is kept on disks. Leave it out."
            )

    def __exit__(self, *_: object) -> None:
        return None


class GatheredParameters:
    """The parameters whole for as long as the block lasts.

    Outside of it a rank holds its shard. Inside they are still DTensors, with all of the values on
    every rank. What rank ``modifier_rank`` changes there is taken over by all ranks; without one,
    changes are forgotten.
    """

    def __init__(
        self,
        params: nn.Module | Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: Any = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, nn.Module):
            params = params.parameters()
        self._params = [params] if isinstance(params, Tensor) else list(params)
        self._modifier, self._enabled = modifier_rank, enabled
        self._swapped: list[tuple[Tensor, nn.Parameter]] = []
        self._mixing = contextlib.ExitStack()

    @torch.no_grad()
    def __enter__(self) -> GatheredParameters:
        for parameter in self._params if self._enabled else ():
            if isinstance(parameter, DTensor):
                copies = [Replicate()] * parameter.device_mesh.ndim
                whole = parameter.redistribute(placements=copies).detach().clone()
                other = nn.Parameter(whole, requires_grad=parameter.requires_grad)
                swap_tensors(parameter, other)  # every reference to the parameter sees the whole
                self._swapped.append((parameter, other))
        if self._swapped:  # plain tensors may be copied into them
            self._mixing.enter_context(implicit_replication())
        return self

    @torch.no_grad()
    def __exit__(self, kind: Any, *_: object) -> None:
        self._mixing.close()
        for parameter, other in self._swapped:
            swap_tensors(parameter, other)
            whole = local(other.detach())
            if self._modifier is not None and kind is None:
                if World.current().size > 1:
                    dist.broadcast(whole, src=self._modifier)
                for piece in held_part(parameter).pieces:
                    piece.tensor.copy_(whole[piece.box.slices()] if whole.ndim else whole)
        self._swapped = []


def register_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Nothing to do: a parameter that another module uses is gathered for it."""


def unregister_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Nothing to do."""


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: list[Any], **_: Any) -> list[Any]:
    """Which modules are gathered at once is ``sharding.units`` here; returns those that match."""
    kinds = tuple(kind for kind in leaf_module_classes if isinstance(kind, type))
    return [module for module in model.modules() if isinstance(module, kinds)]
