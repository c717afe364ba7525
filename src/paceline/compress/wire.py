"""The collectives that gradients travel by, with the bytes that this rank really sends counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Wire:
    """A group's wire. Calls return when the result is there (on a GPU: in the current stream).

    ``sent`` counts the bytes that leave this rank, by what the collectives are known to send: a
    ring all-reduce passes everything on twice but for a rank's own share.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.sent = 0.0

    def sum(self, values: Tensor) -> Tensor:
        """``values`` of all ranks added up, in place."""
        dist.all_reduce(values, group=self.group)
        self.sent += 2 * (self.size - 1) / self.size * _bytes(values)
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        """The ``values`` of every rank, all of one size."""
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values, group=self.group)
        self.sent += (self.size - 1) * _bytes(values)
        return parts

    def swap(self, values: Sequence[Tensor]) -> list[Tensor]:
        """``values[i]`` to the i-th rank; what each rank sent here. All of one size."""
        flat = torch.cat(list(values))
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat, group=self.group)
        self.sent += (self.size - 1) / self.size * _bytes(flat)
        return list(received.chunk(self.size))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
