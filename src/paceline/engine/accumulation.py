"""Where a loop of the user's own stands in its optimizer step, and what each loss counts for."""

from __future__ import annotations

import torch
import torch.distributed as dist

from paceline.data import Share
from paceline.errors import TrainingError
from paceline.world import World


class Accumulation:
    """Counts the passes of a step, and weighs their losses.

    A step is made of ``passes`` passes; at the end of the data it may have fewer. Each rank's loss
    is a mean over its own samples of a pass; its weight makes the sum over ranks and passes the
    mean over all samples of the step. How many these are is known only at its end: until then a
    full step is assumed, and ``correction`` makes up for the difference.
    """

    def __init__(self, passes: int, world: World) -> None:
        self.passes, self._world = passes, world
        self.ends_step = True
        """Whether the pass under way is the last of its step."""
        self.share: Share | None = None
        """How many samples of the pass are this rank's; ``None``: no loader said."""
        self.counts_in_step = True
        """Whether this rank has had a sample in this step."""
        self.number = 0
        """Passes so far."""
        self._pass = 0
        self._assumed = self._seen = 1
        self._items: float | None = None  # of this pass, as backward was told
        self._items_before = 0.0
        self._by_items: bool | None = None

    @property
    def begins_step(self) -> bool:
        """Whether the pass under way is the first of its step."""
        return self._pass == 0

    @property
    def counts(self) -> bool:
        """Whether the pass under way has a sample of this rank."""
        return self.share is None or self.share.samples > 0

    def begin_pass(self, share: Share | None = None, *, is_last: bool = False) -> None:
        """Another pass begins; ``is_last``: there is no more data after it."""
        self.number += 1
        if self.ends_step:
            self._pass = self._seen = 0
            self.counts_in_step, self._items_before, self._by_items = False, 0.0, None
            self._assumed = self.passes * (1 if share is None else share.global_samples)
        else:
            self._pass += 1
            self._items_before += self._items or 0.0
        self._items = None
        self.share = share
        self.ends_step = is_last or self._pass >= self.passes - 1
        self._seen += 1 if share is None else share.global_samples
        self.counts_in_step |= self.counts

    def weight(self, items: float | None = None) -> float:
        """What to multiply the loss of this pass by; ``items``: what it is a mean over."""
        if self._by_items not in (None, items is not None):
            raise TrainingError(
                "backward(loss, count=...): give a count with every loss of a step, or with none."
            )
        self._by_items = items is not None
        if not self.counts:
            return 0.0
        if items is None:
            if self.share is None:
                return 1 / (self.passes * self._world.size)
            return self.share.samples / self._assumed
        if self._items not in (None, items):
            raise TrainingError(
                f"backward(count={items:g}): an earlier loss of this batch was a mean over "
                f"{self._items:g} items. All losses of a batch must count the same items."
            )
        self._items = items
        return items / self._assumed

    def correction(self) -> float:
        """What gradients are to be multiplied by at the end of a step. A collective with counts."""
        if not self._by_items:
            return 1.0 if self._seen == self._assumed else self._assumed / self._seen
        own = self._items_before + (self._items or 0.0)
        total = torch.tensor(own, dtype=torch.float64, device=self._world.device)
        if self._world.size > 1:
            dist.all_reduce(total)
        return self._assumed / max(float(total), 1.0)
