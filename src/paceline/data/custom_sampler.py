"""Map-style datasets under somebody else's sampler: the order is the sampler's, not ours.

Every rank iterates the whole sampler and takes its share of each batch of indices. Random samplers
that draw from the process-wide generators draw the same on every rank, by seed and epoch; one with
a generator of its own is replayed from its first epoch where that is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler

from paceline.data.arguments import length_of
from paceline.data.batch_shares import BatchCut
from paceline.data.fingerprints import INDICES, Leaf, digest
from paceline.data.map_dataset import BatchRequest, MapSource
from paceline.data.randomness import RandomStream, seed_for
from paceline.data.rank_comparison import Drawn
from paceline.data.sample_source import Fetching, LoaderPosition, set_epoch
from paceline.errors import DataError


class SamplerSource(MapSource):
    """A dataset in the order of a batch sampler: a place is reached by iterating up to it."""

    kind = "sampler"
    same_on_ranks = (
        "The sampler must draw the same indices on every rank, of which Paceline gives each rank "
        "its share: seed its own generator alike on all ranks (and by the epoch), or let it draw "
        "from those of torch, random or numpy.random, which are seeded for it, and do not pick a "
        "part by rank. The dataset must hold the same samples on all ranks."
    )

    def __init__(
        self, dataset: Any, batches: Iterable[Any], cut: BatchCut, fetching: Fetching, seed: int
    ) -> None:
        super().__init__(dataset, cut, fetching, seed)
        self.batches = batches
        self._probes: tuple[Any, ...] = ()
        sampler = getattr(batches, "sampler", None)
        self._parts = [part for part in (batches, sampler) if part is not None]
        self._generators = {
            generator: generator.get_state()
            for part in self._parts
            if isinstance(generator := getattr(part, "generator", None), torch.Generator)
        }
        self._generators_at = 0
        self.samples_per_epoch = None if sampler is None else length_of(sampler)

    @property
    def steps_per_epoch(self) -> int | None:
        """As many as the sampler says."""
        return length_of(self.batches)

    def follow(self, cut: BatchCut) -> None:
        """Cut the data this way from now on; a plain batch sampler makes batches of that size."""
        super().follow(cut)
        if type(self.batches) is BatchSampler and self.batches.batch_size != cut.global_batch:
            self.batches = BatchSampler(self.batches.sampler, cut.global_batch, cut.drop_last)
            self._parts[0] = self.batches

    def probes(self, epoch: int) -> tuple[Any, ...]:
        """None of its own: which samples there are is known when the sampler draws."""
        return self._probes

    def identity(self) -> dict[str, Any]:
        """What must be the same for a state to fit."""
        return {"seed": self.seed}

    def requests(self, place: LoaderPosition) -> Iterator[BatchRequest]:
        """The plan from ``place`` to the end of its epoch."""
        self._wind_generators(place.epoch)
        skip, first = place.offset, True
        for batch in self._epoch(place.epoch):
            if skip >= len(batch):
                skip -= len(batch)
            elif skip:
                raise DataError(
                    f"position {place.position} falls inside a batch that the DataLoader's own "
                    "batch sampler made. Such a loader can only stand between its batches: resume "
                    "with the batch size the state was saved with."
                )
            else:
                begin, end = self.cut.share(len(batch))
                indices = batch[begin:end] if begin < end else batch[:1]
                yield BatchRequest(
                    place.epoch, indices, end - begin, len(batch), *self._compared(batch, first)
                )
                first = False
        if skip:
            raise DataError(
                f"the DataLoader's sampler ended {skip} samples before offset {place.offset} of "
                f"epoch {place.epoch}: it is not the sampler this position was saved with."
            )
        self._generators_at = place.epoch + 1

    def _compared(self, batch: list[Any], first: bool) -> tuple[tuple[Any, ...], Drawn]:
        """What ranks compare of a batch: two samples of the first one, and the indices of all."""
        if not self.compares:
            return (), ()
        if first:
            self._probes = tuple(batch[:1] + batch[1:][-1:])
        plain = [int(i) if isinstance(i, torch.Tensor) and i.ndim == 0 else i for i in batch]
        indices = Leaf(INDICES, f"{len(batch)} drawn", (*plain[:3], digest(plain)))
        return (self._probes if first else ()), (("the sampler's batch of ", (indices,)),)

    def _epoch(self, epoch: int) -> Iterator[list[Any]]:
        """The batches of one epoch, drawn on generators that every rank seeds alike."""
        for part in self._parts:
            set_epoch(part, epoch)
        draw = RandomStream(seed_for(self.seed, epoch))
        iterator = draw.run(lambda: iter(self.batches))
        while (batch := draw.run(lambda: next(iterator, None))) is not None:
            if not (indices := list(batch)):
                raise DataError(
                    "the DataLoader's batch sampler gave an empty batch: a batch must name at "
                    "least one index."
                )
            yield indices

    def _wind_generators(self, epoch: int) -> None:
        """Bring generators that the samplers own to where ``epoch`` begins."""
        if not self._generators or epoch == self._generators_at:
            self._generators_at = -1  # in use, until the epoch ends
            return
        for generator, state in self._generators.items():
            generator.set_state(state)
        for earlier in range(epoch):
            for _ in self._epoch(earlier):
                pass
        self._generators_at = -1
