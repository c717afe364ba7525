"""Streams that each data-parallel rank reads for itself: shards picked by rank, as WebDataset does.

A step takes its global batch from all streams, each rank's share from its own. Ranks tell each
other how many samples they found, so every sample of every stream is delivered once: where one
stream ends before another, its rank goes on with empty batches until all have ended.

Where the loader stands is how far each rank has read. Other ranks would read other streams: a state
fits the same number of data-parallel ranks, and is refused on any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.data.batch_shares import BatchCut
from paceline.data.fingerprints import digest, digest_of, fingerprint
from paceline.data.iterable_dataset import collated
from paceline.data.randomness import RandomStream, seed_for
from paceline.data.sample_source import (
    Delivery,
    Fetching,
    LoaderPosition,
    Reader,
    SampleSource,
    read_through,
    set_epoch,
)
from paceline.errors import DataError
from paceline.layout import Layout
from paceline.world import World
from paceline.world.agreement import agree_on_call

_LOOKS = 8
"""Exchanges of an epoch that look for ranks that read the same stream."""


@dataclass(frozen=True)
class Offsets:
    """How many samples each data-parallel rank has read of its stream in this epoch."""

    by_rank: list[int]


class RankStreamSource(SampleSource):
    """An iterable dataset that gives each data-parallel rank samples of its own."""

    kind = "rank streams"
    order_is_ours = True  # there is nothing to compare but the loader: the streams differ
    same_on_ranks = "Give every rank the same kind of dataset."

    def __init__(self, dataset: Any, cut: BatchCut, fetching: Fetching, seed: int) -> None:
        self.dataset = dataset
        self.cut = cut
        self.fetching = fetching
        self.seed = seed
        self.layout: Layout | None = None
        """Which ranks read one stream; set by the loader when it knows its world."""

    def follow(self, cut: BatchCut) -> None:
        """Cut the data this way from now on."""
        if cut.global_batch < cut.size:
            raise DataError(
                f"global_batch={cut.global_batch} with sharded_by_rank must be at least the "
                f"{cut.size} data-parallel ranks: each takes samples from its own stream."
            )
        super().follow(cut)

    def reader(self) -> Reader:
        """Reads here, or in the one worker process that a stream may have."""
        return self._read

    def identity(self) -> dict[str, Any]:
        """What must be the same for a state to fit."""
        return {"seed": self.seed, "data_parallel_ranks": self.cut.size}

    def place(self, position: int) -> LoaderPosition:
        """Only the beginning: a position does not tell how far each rank has read."""
        if position:
            raise DataError(
                f"seek({position}): with sharded_by_rank a position does not say how far each "
                "rank has read of its own stream. Use load_state_dict, which does, or seek(0)."
            )
        return LoaderPosition()

    def restore(self, saved: dict[str, Any]) -> LoaderPosition:
        """The place that ``save`` wrote."""
        place = LoaderPosition(**saved)
        return place if place.state is None else replace(place, state=Offsets(**place.state))

    def _read(self, place: LoaderPosition) -> Iterator[Delivery]:
        offsets = [0] * self.cut.size if place.state is None else list(place.state.by_rank)
        dataloader: DataLoader[Any] = DataLoader(
            _OwnStream(self, place.epoch, offsets[self.cut.rank]),
            batch_size=None,
            generator=torch.Generator().manual_seed(seed_for(self.seed)),
            **self.fetching.dataloader_options(),
        )
        running = _StreamProgress(self)
        own = read_through(dataloader)
        while True:
            delivery = next(own, None)
            if delivery is not None:
                running.read(delivery)
            counts = running.exchange()
            if not any(counts):
                return
            offsets = [offset + count for offset, count in zip(offsets, counts, strict=True)]
            yield Delivery(
                running.batch, counts[self.cut.rank], sum(counts), Offsets(list(offsets))
            )


class _OwnStream(IterableDataset[Any]):
    """This rank's batches of its own stream; at its end, one without samples."""

    def __init__(self, source: RankStreamSource, epoch: int, offset: int) -> None:
        self.source, self.epoch, self.offset = source, epoch, offset

    def __iter__(self) -> Iterator[Delivery]:
        source, cut = self.source, self.source.cut
        # Alike on all ranks: a list of shards shuffled before each rank picks its own stays one.
        draw = RandomStream(seed_for(source.seed, self.epoch))
        samples = draw.run(self._open)
        begin, end = cut.share(cut.global_batch)
        collate, offset, seen = source.fetching.collate_fn, self.offset, None
        while batch := draw.run(lambda: list(islice(samples, end - begin))):
            seed = seed_for(source.seed, self.epoch, offset, cut.rank)
            offset += len(batch)
            seen = batch[0]
            compared = tuple(
                (f"sample {place}", fingerprint(s)) for place, s in enumerate(batch[:4])
            )
            mine = collated(batch, 0, len(batch), collate, seed)
            yield Delivery(mine, len(batch), len(batch), drawn=compared)
        if seen is None:
            seen = self._any_sample()
        empty = collated([seen], 0, 0, collate, seed_for(source.seed, self.epoch, offset, cut.rank))
        yield Delivery(empty, 0, 0, drawn=())

    def _open(self) -> Iterator[Any]:
        dataset = self.source.dataset
        set_epoch(dataset, self.epoch)
        samples = iter(dataset)
        skipped = sum(1 for _ in islice(samples, self.offset))
        if skipped < self.offset:
            raise DataError(
                f"the stream of data-parallel rank {self.source.cut.rank} ended after {skipped} "
                f"samples of epoch {self.epoch}, before the {self.offset} that were read when the "
                "state was saved: it is not the stream of then."
            )
        return samples

    def _any_sample(self) -> Any:
        """A sample that gives an empty batch its shape, of a stream that is at its end."""
        first = next(iter(self.source.dataset), None)
        if first is None:
            cut = self.source.cut
            raise DataError(
                f"the stream of data-parallel rank {cut.rank} of {cut.size} has no sample at all, "
                "so it cannot even be given an empty batch. Spread the data over fewer ranks, or "
                "over more shards."
            )
        return first


class _StreamProgress:
    """What this rank has read of its stream, and the exchange with the others about it."""

    def __init__(self, source: RankStreamSource) -> None:
        self._source = source
        self.batch: Any = None
        self._samples = 0
        self._exact, self._rough = 0, 0
        self._prints: set[Any] = set()
        self._exchanges = 0
        self._equal: set[tuple[int, int]] = set()

    def read(self, delivery: Delivery) -> None:
        self.batch, self._samples = delivery.batch, delivery.samples
        samples = [leaves for _, leaves in delivery.drawn or ()]
        self._exact = digest((self._exact, samples))
        digests = [digest_of(leaves, without=frozenset(), rough=True) for leaves in samples]
        self._rough = digest((self._rough, digests))
        if len(self._prints) < 2:
            self._prints.update(samples)

    def exchange(self) -> list[int]:
        """How many samples each data-parallel rank has for this step. A collective."""
        layout, samples = self._source.layout, self._samples
        self._samples = 0  # unless there is another delivery, the stream is over
        if layout is None or layout.world_size == 1:
            return [samples]
        world = World.current()
        mine = _StreamReport(samples, len(self._prints) > 1, self._exact, self._rough).packed()
        with world.pulse.during("waiting"):
            numbers = agree_on_call(
                world.everyone, "sharing out rank streams", checks=True, number=mine
            )
        reports = [_StreamReport.unpacked(number) for number in numbers]
        places = [layout.coordinate(rank).dp for rank in range(layout.world_size)]
        first = {place: rank for rank, place in reversed(list(enumerate(places)))}
        for rank, place in enumerate(places):
            one, other = reports[first[place]], reports[rank]
            if (one.samples, one.rough) != (other.samples, other.rough):
                raise DataError(_peers_differ(first[place], rank, place, layout))
        streams = [reports[first[place]] for place in range(layout.dp)]
        self._refuse_repeated(streams)
        return [stream.samples for stream in streams]

    def _refuse_repeated(self, streams: list[_StreamReport]) -> None:
        """Streams that are the same from their beginning are one stream that several ranks read.

        Two looks in a row must find them equal: a digest is short. Samples that are all the same
        tell nothing.
        """
        self._exchanges += 1
        if self._exchanges > _LOOKS:
            return
        ranks: dict[int, int] = {}
        equal = set()
        for rank, stream in enumerate(streams):
            other = ranks.setdefault(stream.exact, rank)
            if other != rank and stream.varied and stream.samples:
                equal.add((other, rank))
        again, self._equal = sorted(equal & self._equal), equal
        if again:
            raise DataError(
                f"sharded_by_rank=True, but data-parallel ranks {again[0][0]} and {again[0][1]} "
                "read the same samples, each of which would count more than once. Let the dataset "
                "pick its shards by the data-parallel rank, or leave sharded_by_rank out: Paceline "
                "then gives each rank its share of the one stream."
            )


class _StreamReport(NamedTuple):
    """What a rank reports of its stream, in one number."""

    samples: int
    varied: bool
    """Whether its samples were not all the same so far."""
    exact: int
    rough: int
    """Two digests of all samples so far; ``rough`` leaves out what machines may differ in."""

    def packed(self) -> int:
        exact, rough = self.exact % (1 << 32), self.rough % (1 << 10)
        return ((self.samples << 1 | self.varied) << 32 | exact) << 10 | rough

    @classmethod
    def unpacked(cls, number: int) -> _StreamReport:
        rest, rough = divmod(number, 1 << 10)
        rest, exact = divmod(rest, 1 << 32)
        return cls(rest >> 1, bool(rest & 1), exact, rough)


def _peers_differ(one: int, other: int, place: int, layout: Layout) -> str:
    return (
        f"sharded_by_rank=True with layout {str(layout)!r}: ranks {one} and {other} work on the "
        f"same samples (both are data-parallel rank {place} of {layout.dp}), but their streams "
        "differ. Let the dataset pick its shards by the data-parallel rank "
        "(layout.coordinate(rank).dp of layout.dp), not by the rank."
    )
