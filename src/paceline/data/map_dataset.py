"""Map-style datasets: samples by index, fetched by torch's DataLoader.

A plan says which indices make the next global batch; the main process sends each rank's part of it
to the DataLoader as a ``BatchRequest``, and a ``Fetcher`` (here or in a worker process)
turns that into a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from paceline.data.batch_shares import BatchCut
from paceline.data.batch_slicing import empty_batch
from paceline.data.fingerprints import fingerprint
from paceline.data.randomness import (
    Numbers,
    isolated,
    next_numbers,
    numpy_random,
    seed_all,
    seed_for,
)
from paceline.data.rank_comparison import READINGS, Drawn, Reread, reread_of
from paceline.data.sample_source import (
    Collate,
    Delivery,
    Fetching,
    LoaderPosition,
    Reader,
    SampleSource,
    read_through,
)
from paceline.data.shuffle_order import Order
from paceline.errors import DataError

# Indices are drawn for many steps at a time: the order's cost is per call, hardly per index.
_DRAW_AT_ONCE = 1024
_PROBES = 3


class BatchRequest(NamedTuple):
    """This rank's part of one global batch.

    ``indices`` is never empty: where this rank has no ``samples``, it holds one index that gives
    the empty batch its shape.
    """

    epoch: int
    indices: list[int]
    samples: int
    global_samples: int
    probes: tuple[Any, ...] = ()
    """Samples that every rank fetches, to compare them."""
    drawn: Drawn = ()
    """What the plan drew for the whole global batch."""


class Fetcher(Dataset[Any]):
    """Turns requests into batches; what a sample draws depends on seed, epoch and index alone.

    That holds for the process-wide generators (torch CPU, ``random``, NumPy), at every number of
    ranks and workers. Seeding them for each sample costs as much as many a sample, so it starts
    with the first batch that is seen to draw; that batch is fetched a second time.
    """

    def __init__(self, dataset: Any, collate_fn: Collate, seed: int) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.seed = seed
        many = getattr(dataset, "__getitems__", None)
        self._fetch_many = many if callable(many) else None  # as torch has it, it may be None
        self._draws = False
        self._by_sample = True
        self._untouched: tuple[int, Numbers] | None = None

    def __getattr__(self, name: str) -> Any:
        # worker_init_fn finds this object as get_worker_info().dataset and asks for its own names.
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)  # pickle asks before there is a dataset
        return getattr(self.dataset, name)

    def __getitems__(self, request: BatchRequest) -> Delivery:
        """The batch for ``request``; what a DataLoader calls for each item of its batch sampler."""
        with isolated():
            if request.samples:
                batch = self._batch(request.epoch, request.indices)
            else:
                batch = empty_batch(lambda n: self._batch(request.epoch, request.indices * n))
            probes = tuple(
                (f"sample {index!r}", fingerprint(self.probe(request.epoch, index)))
                for index in request.probes
            )
        drawn = (*request.drawn, *probes) or None
        return Delivery(batch, request.samples, request.global_samples, drawn=drawn)

    def probe(self, epoch: int, index: Any) -> Any:
        """One sample by itself, as every rank sees it."""
        seed_all(seed_for(self.seed, epoch, index))
        samples = self._fetch([index])
        return samples[0] if isinstance(samples, list | tuple) else samples

    def _batch(self, epoch: int, indices: list[Any]) -> Any:
        samples = self._samples(epoch, indices)
        # A collate function that draws (a masking collator) does so by its first sample.
        seed_all(seed_for(self.seed, epoch, indices[0], 1))
        return self.collate_fn(samples)

    def _samples(self, epoch: int, indices: list[Any]) -> Any:
        if not self._draws:
            untouched = self._numbers_if_untouched(epoch)
            samples = self._fetch(indices)
            if next_numbers() == untouched:
                return samples
            self._draws = True
            # A dataset may hand over many samples as one object that only its collate_fn knows.
            self._by_sample = isinstance(samples, Sequence) and len(samples) == len(indices)
        if self._by_sample:
            return [self._sample(epoch, index) for index in indices]
        seed_all(seed_for(self.seed, epoch, indices[0]))
        return self._fetch(indices)

    def _fetch(self, indices: list[Any]) -> Any:
        if self._fetch_many is not None:
            return self._fetch_many(indices)
        return [self.dataset[index] for index in indices]

    def _sample(self, epoch: int, index: Any) -> Any:
        seed_all(seed_for(self.seed, epoch, index))
        return self._fetch([index])[0]

    def _numbers_if_untouched(self, epoch: int) -> Numbers:
        """Seed for the epoch; returns what the generators give next if nobody draws before."""
        seed = seed_for(self.seed, epoch)
        # numpy.random may be loaded at any time, even by a sample: then the numbers differ.
        key = epoch if numpy_random() is None else -1 - epoch
        if self._untouched is None or self._untouched[0] != key:
            seed_all(seed)
            self._untouched = (key, next_numbers())
        seed_all(seed)
        return self._untouched[1]


class MapSource(SampleSource, ABC):
    """A map-style dataset and a plan of which indices make each global batch."""

    def __init__(self, dataset: Any, cut: BatchCut, fetching: Fetching, seed: int) -> None:
        self.dataset = dataset
        self.cut = cut
        self.fetching = fetching
        self.seed = seed

    @abstractmethod
    def requests(self, place: LoaderPosition) -> Iterator[BatchRequest]:
        """The plan from ``place`` to the end of its epoch."""

    @abstractmethod
    def probes(self, epoch: int) -> tuple[Any, ...]:
        """The indices of a few samples to compare between the ranks, alike on all of them."""

    def reader(self) -> Reader:
        """Reads through a DataLoader; its workers live as long as the reader."""
        return _MapReader(self)

    def reread(self, epoch: int) -> Reread:
        """Read again, in this process, some of what ranks differ in."""
        fetcher = Fetcher(self.dataset, self.fetching.collate_fn, self.seed)
        with isolated():
            readings = [
                [fingerprint(fetcher.probe(epoch, index)) for index in self.probes(epoch)]
                for _ in range(READINGS)
            ]
        return reread_of(readings)


class _MapReader:
    def __init__(self, source: MapSource) -> None:
        self._plan = _Plan(source)
        options = source.fetching.dataloader_options()
        self._dataloader: DataLoader[Any] = DataLoader(
            Fetcher(source.dataset, source.fetching.collate_fn, source.seed),
            batch_sampler=self._plan,  # type: ignore[arg-type]  # any iterable serves
            # Else each epoch would draw its workers' base seed from the model's generator.
            generator=torch.Generator().manual_seed(seed_for(source.seed)),
            persistent_workers=source.fetching.workers > 0,
            **options,
        )

    def __call__(self, place: LoaderPosition) -> Iterator[Delivery]:
        self._plan.place = place
        return read_through(self._dataloader)


class _Plan:
    """The batch sampler: iterated anew by the DataLoader at the start of each iteration."""

    def __init__(self, source: MapSource) -> None:
        self._source = source
        self.place = LoaderPosition()

    def __iter__(self) -> Iterator[BatchRequest]:
        return self._source.requests(self.place)


class OrderSource(MapSource):
    """A dataset in Paceline's own order: any place is reached at once."""

    kind = "order"
    order_is_ours = True
    same_on_ranks = (
        "Every rank must hold the whole dataset, with the same samples under the same indices: "
        "shuffle a list of files and split a dataset (random_split) by a fixed seed, make random "
        "data from one, and do not pick a part by rank: Paceline gives each rank its share."
    )

    def __init__(
        self,
        dataset: Any,
        order: Order,
        cut: BatchCut,
        fetching: Fetching = Fetching(),  # noqa: B008
    ) -> None:
        super().__init__(dataset, cut, fetching, order.seed)
        self.order = order
        self.samples_per_epoch = order.n
        self.check()

    def check(self) -> None:
        """Raise where the cut leaves nothing of the data."""
        if self.cut.drop_last and self.order.n < self.cut.global_batch:
            raise DataError(
                f"drop_last=True drops all {self.order.n} samples of the dataset: they are fewer "
                f"than global_batch={self.cut.global_batch}. Keep the short batch, or take a "
                "smaller one."
            )

    def follow(self, cut: BatchCut) -> None:
        """Cut the data this way from now on."""
        super().follow(cut)
        self.check()

    def probes(self, epoch: int) -> tuple[int, ...]:
        """Others each epoch, so that what changes with the epoch is seen."""
        return tuple(self.order.probes(epoch, _PROBES))

    def requests(self, place: LoaderPosition) -> Iterator[BatchRequest]:
        """The plan from ``place`` to the end of its epoch."""
        batch, n = self.cut.global_batch, self.order.n
        stop = n - (n - place.offset) % batch if self.cut.drop_last else n
        starts = range(place.offset, stop, batch)
        mine = -(-batch // self.cut.size)  # the largest share of any rank
        steps_at_once = max(1, _DRAW_AT_ONCE // mine)
        probes = self.probes(place.epoch) if self.compares else ()
        for step in range(0, len(starts), steps_at_once):
            for request in self._draw(place.epoch, starts[step : step + steps_at_once]):
                yield request._replace(probes=probes) if probes else request
                probes = ()

    def _draw(self, epoch: int, starts: Sequence[int]) -> Iterator[BatchRequest]:
        """The requests of a few steps: only this rank's indices are computed."""
        totals = [min(self.cut.global_batch, self.order.n - start) for start in starts]
        shares = [self.cut.share(total) for total in totals]
        spans = [(begin, end) if begin < end else (0, 1) for begin, end in shares]
        positions = torch.cat(
            [
                torch.arange(at + begin, at + end)
                for at, (begin, end) in zip(starts, spans, strict=True)
            ]
        )
        drawn = self.order.at(epoch, positions).split([end - begin for begin, end in spans])
        for indices, (begin, end), total in zip(drawn, shares, totals, strict=True):
            yield BatchRequest(epoch, indices.tolist(), end - begin, total)

    def after(self, place: LoaderPosition, delivery: Delivery) -> LoaderPosition:
        """The place once ``delivery`` has been handed to the user."""
        return self.place(place.position + delivery.global_samples)

    def next_epoch(self, place: LoaderPosition) -> LoaderPosition:
        """The start of the epoch that follows ``place``."""
        return self.place((place.epoch + 1) * self.order.n)

    def place(self, position: int) -> LoaderPosition:
        """The place at ``position``, or where the next whole batch starts with ``drop_last``."""
        place = super().place(position)
        if self.cut.drop_last and self.order.n - place.offset < self.cut.global_batch:
            return self.next_epoch(place)
        return place

    def identity(self) -> dict[str, Any]:
        """What must be the same for a position to mean the same sample."""
        return self.order.identity()

    def save(self, place: LoaderPosition) -> dict[str, Any]:
        """One integer says it all."""
        return {"position": place.position}

    def restore(self, saved: dict[str, Any]) -> LoaderPosition:
        """The place that ``save`` wrote."""
        return self.place(**saved)
