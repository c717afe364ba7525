"""What a loop of the user's own asks of its ranks: who prints, who goes first, whose results."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from paceline.engine.accelerator_parts import AcceleratorParts
from paceline.engine.gathering import gathered, samples_only
from paceline.world import collectives


class RanksAccelerator(AcceleratorParts):
    """The part of ``paceline.Accelerator`` that knows the ranks."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.world.device

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.world.is_main

    def print(self, *values: Any, **options: Any) -> None:
        """``print`` on rank 0 alone."""
        if self.world.is_main:
            builtins.print(*values, **options)

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """A block that rank 0 runs before the others, to download or to write a cache, say."""
        if not self.world.is_main:
            collectives.barrier()
        try:
            yield
        finally:
            if self.world.is_main:
                collectives.barrier()

    def gather(self, values: Any) -> Any:
        """Tensors of all ranks put together along dimension 0, in ``values`` of any structure."""
        return gathered(values, self.world)

    def gather_for_metrics(self, values: Any) -> Any:
        """What all ranks computed for a batch: each of its samples once, in the data's order.

        Of tensors, dimension 0 must be the samples; a scalar (a loss) stands for each of them.
        """
        if self._active is None or self._active.share is None or self._active.rows is None:
            return gathered(values, self.world)
        own = samples_only(values, self._active.rows, self._active.share.samples)
        return gathered(own, self.world)
