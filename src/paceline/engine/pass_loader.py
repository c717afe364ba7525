"""The loader of a loop of the user's own: one pass through the model for each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from paceline.data import Loader, Share
from paceline.engine.accumulation import Accumulation
from paceline.engine.batch import batch_size, move, narrow, placeholder
from paceline.world import World


class PassLoader:
    """Yields this rank's share of each batch, on its device; made by ``Accelerator.prepare``.

    A step takes ``accumulate`` batches, fewer at the end of an epoch. Every rank gets equally many:
    one whose share of a short last batch is empty gets a sample again, which counts for nothing.
    """

    def __init__(
        self,
        loader: Loader,
        passes: int,
        world: World,
        *,
        dtype: torch.dtype | None,
        drawn: Callable[[PassLoader], None],
    ) -> None:
        self.loader = loader
        self.accumulation = Accumulation(passes, world)
        self.rows: int | None = None
        """How many samples the batch last yielded has, one that counts for nothing included."""
        self._world, self._dtype, self._drawn = world, dtype, drawn
        self._spare: Any = None
        self._position: dict[str, Any] | None = None
        loader.expect_all_ranks()

    @property
    def share(self) -> Share | None:
        """How many samples of the batch last yielded are this rank's, and how many there are."""
        return self.accumulation.share

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0: where a loop that is resumed goes on."""
        return self.loader.epoch

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch, share, is_last in self._ahead():
            self.accumulation.begin_pass(share, is_last=is_last)
            if share.samples:
                self._spare = batch
            elif self._spare is not None:
                batch = narrow(self._spare, batch_size(self._spare), 0, 1)
            else:
                batch = placeholder(batch)
            self.rows = max(share.samples, 1)
            self._drawn(self)
            yield move(batch, self._world.device, self._dtype)

    def _ahead(self) -> Iterator[tuple[Any, Share, bool]]:
        """Each batch, and whether it is the last; a step of several has to know that in time."""
        if self.accumulation.passes == 1:
            for batch in self.loader:
                yield batch, self.loader.share, False
            return
        found: tuple[Any, Share] | None = None
        try:
            position = self.loader.state_dict()
            for batch in self.loader:
                if found is not None:
                    self._position = position  # what was drawn ahead is not handed over yet
                    yield *found, False
                found, position = (batch, self.loader.share), self.loader.state_dict()
            self._position = None
            if found is not None:
                last, found = found, None
                yield *last, True
        finally:
            if found is not None and self._position is not None:  # left early
                position, self._position = self._position, None
                self.loader.load_state_dict(position)

    def state_dict(self) -> dict[str, Any]:
        """The position in the global order."""
        return self.loader.state_dict() if self._position is None else self._position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position, on this or another number of ranks."""
        self._position = None
        self.accumulation.ends_step = True
        self.loader.load_state_dict(state)
