"""The collectives that gradients travel by, with the bytes that this rank really sends counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Wire:
    """A group's wire. Calls return when the result is there (on a GPU: in the current stream).

    ``sent`` counts the bytes that leave this rank, by what the collectives are known to send: a
    ring all-reduce passes everything on twice but for a rank's own share. Without a group this
    rank is alone, and nothing is sent.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.sent = 0.0

    def sum(self, values: Tensor) -> Tensor:
        """``values`` of all ranks added up, in place."""
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
            self.sent += ring_bytes(values, self.size)
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        """The ``values`` of every rank, all of one size."""
        if self.size == 1:
            return [values]
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values, group=self.group)
        self.sent += (self.size - 1) * bytes_of(values)
        return parts

    def swap(self, values: Sequence[Tensor]) -> list[Tensor]:
        """``values[i]`` to the i-th rank; what each rank sent here. All of one size."""
        if self.size == 1:
            return list(values)
        flat = torch.cat(list(values))
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat, group=self.group)
        self.sent += (self.size - 1) / self.size * bytes_of(flat)
        return list(received.chunk(self.size))


def ring_bytes(values: Tensor, ranks: int) -> float:
    """What one of ``ranks`` ranks sends to add ``values`` up in a ring."""
    return 2 * (ranks - 1) / ranks * bytes_of(values)


def bytes_of(tensor: Tensor) -> int:
    """The bytes of its elements."""
    return tensor.numel() * tensor.element_size()
