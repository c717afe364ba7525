"""What averages gradients over the data-parallel ranks, where it is not torch's own way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class UnitParameter(NamedTuple):
    """A parameter of a sharded unit: its name in the whole model, and its shape there."""

    name: str
    shape: tuple[int, ...]


class Averaging(Protocol):
    """The engine gives one to a layout whose gradients are to travel in another form."""

    @property
    def is_due(self) -> bool:
        """Whether a rank without others has something to add to its gradients."""

    def hook(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """The means of one of DDP's buckets, to be."""

    def rewired(self) -> None:
        """DDP has put its buckets together anew."""

    def average(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], slot: int
    ) -> None:
        """Replace a bucket of gradients by their means. A collective."""

    def scatter(self, parameters: Sequence[UnitParameter], slot: int) -> Callable[[Tensor], Tensor]:
        """A reduce-scatter of a sharded unit's gradients: from a row a rank to the own sum."""


def sparse_embedding(model: nn.Module) -> str | None:
    """The first embedding whose gradient is a list of rows, which DDP's own way alone can send."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return name
    return None
