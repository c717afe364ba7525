"""Data that comes in sequence: iterable datasets, and DataLoaders that hand over ready batches.

Every rank reads the same stream and keeps its share of each global batch, so a stream that is
deterministic gives the same data at every world size. It may draw from the process-wide generators:
they are seeded alike on every rank, by seed and epoch, while the stream is being read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.data.arguments import length_of
from paceline.data.batch_shares import BatchCut
from paceline.data.batch_slicing import count_rows, cut_rows, empty_batch
from paceline.data.fingerprints import Fingerprint, fingerprint
from paceline.data.randomness import RandomStream, isolated, seed_all, seed_for
from paceline.data.rank_comparison import READINGS, Drawn, Reread, reread_of
from paceline.data.sample_source import (
    Collate,
    Delivery,
    Fetching,
    LoaderPosition,
    Reader,
    SampleSource,
    read_through,
    set_epoch,
)
from paceline.errors import DataError

_COMPARED = 4
"""Samples of each global batch that ranks compare, its first and its last among them."""
_READ_AGAIN = 32
"""Samples of a stream that are read again where ranks differ."""
SAME_STREAM = (
    "Every rank must read the same stream, of which Paceline gives each rank its share. Where the "
    "dataset picks its shards by rank (RANK, get_rank(), split_by_node), leave that out, or keep "
    "it and pass sharded_by_rank=True. Where it shuffles, seed that alike on all ranks, by the "
    "epoch that set_epoch tells it."
)


@dataclass(frozen=True)
class StreamState:
    """Where a stream that can save itself stands, and the generators it draws from."""

    dataset: Any
    random: dict[str, Any]


def can_save_itself(dataset: Any) -> bool:
    """Whether a stream has the ``state_dict`` and ``load_state_dict`` that spare it skipping."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


class StreamSource(SampleSource):
    """An iterable dataset of single samples.

    A place is reached by the dataset's own ``load_state_dict`` if it has one, else by reading up
    to it and throwing away.
    """

    kind = "stream"
    same_on_ranks = SAME_STREAM

    def __init__(self, dataset: Any, cut: BatchCut, fetching: Fetching, seed: int) -> None:
        self.dataset = dataset
        self.cut = cut
        self.fetching = fetching
        self.seed = seed
        self.saves_itself = can_save_itself(dataset)
        self.first_state = copy.deepcopy(dataset.state_dict()) if self.saves_itself else None
        self._broken_off = False
        self.samples_per_epoch = length_of(dataset)

    def reader(self) -> Reader:
        """Reads here, or in the one worker process that a stream may have."""
        return self._read

    def _read(self, place: LoaderPosition) -> Iterator[Delivery]:
        shared = SharedStream(self, place, rewind=self.saves_itself and self._broken_off)
        self._broken_off = True
        dataloader: DataLoader[Any] = DataLoader(
            shared,
            batch_size=None,
            generator=torch.Generator().manual_seed(seed_for(self.seed)),
            **self.fetching.dataloader_options(),
        )
        yield from read_through(dataloader)
        self._broken_off = False

    def reread(self, epoch: int) -> Reread:
        """Read again, in this process, some of what ranks differ in."""
        first_state = self.first_state if self.saves_itself else None
        return reread_stream(self.dataset, seed_for(self.seed, epoch), epoch, first_state)

    def identity(self) -> dict[str, Any]:
        """What must be the same for a state to fit."""
        return {"seed": self.seed}

    def restore(self, saved: dict[str, Any]) -> LoaderPosition:
        """The place that ``save`` wrote."""
        place = LoaderPosition(**saved)
        if place.state is None:
            return place
        if not self.saves_itself:
            raise DataError(
                "the state holds a stream's own state_dict, but this "
                f"{type(self.dataset).__name__} has no load_state_dict to take it. Give the "
                "dataset that the state was saved with."
            )
        return replace(place, state=StreamState(**place.state))


class SharedStream(IterableDataset[Any]):
    """This rank's share of each global batch of a stream, from a place to the stream's end."""

    def __init__(self, source: StreamSource, place: LoaderPosition, rewind: bool) -> None:
        self.source = source
        self.place = place
        self.rewind = rewind

    def __iter__(self) -> Iterator[Delivery]:
        source, cut, place = self.source, self.source.cut, self.place
        draw = RandomStream(seed_for(source.seed, place.epoch))
        samples = draw.run(self._open)
        if place.state is not None:
            draw.set_state(place.state.random)
        offset = place.offset
        while batch := draw.run(lambda: list(islice(samples, cut.global_batch))):
            if cut.drop_last and len(batch) < cut.global_batch:
                return
            state = None
            if source.saves_itself:
                state = StreamState(source.dataset.state_dict(), draw.state())
            begin, end = cut.share(len(batch))
            seed = seed_for(source.seed, place.epoch, offset, cut.rank)
            mine = collated(batch, begin, end, source.fetching.collate_fn, seed)
            drawn = drawn_of(batch, offset) if source.compares else None
            offset += len(batch)
            # A stream that came to its end may stand at its next beginning: so must we.
            last = len(batch) < cut.global_batch
            yield Delivery(mine, end - begin, len(batch), state, last, drawn)

    def _open(self) -> Iterator[Any]:
        """The stream, brought to the place."""
        dataset, place = self.source.dataset, self.place
        set_epoch(dataset, place.epoch)
        if place.state is not None:
            dataset.load_state_dict(copy.deepcopy(place.state.dataset))
            return iter(dataset)
        if self.rewind:  # it stands in the middle of an iteration that was broken off
            dataset.load_state_dict(copy.deepcopy(self.source.first_state))
        samples = iter(dataset)
        skipped = sum(1 for _ in islice(samples, place.offset))
        if skipped < place.offset:
            raise DataError(
                f"the stream ended after {skipped} samples of epoch {place.epoch}, before offset "
                f"{place.offset}: it is not the stream this position was saved with, or the "
                "position lies in a later epoch (load_state_dict knows the epoch, seek does not)."
            )
        return samples


def drawn_of(batch: list[Any], offset: int) -> Drawn:
    """Some samples of a batch that begins ``offset`` samples into the epoch, to be compared."""
    last = len(batch) - 1
    places = sorted({last * part // (_COMPARED - 1) for part in range(_COMPARED)})
    return tuple((f"sample {offset + place}", fingerprint(batch[place])) for place in places)


def reread_stream(dataset: Any, seed: int, epoch: int, first_state: Any = None) -> Reread:
    """What reading the first samples of a stream again, and again, shows.

    A copy is read: the stream itself is in the middle of its own reading. A stream that cannot be
    copied, or not be read again, is taken to be what it says.
    """
    try:
        stream = copy.deepcopy(dataset)
        return reread_of(
            [_first_fingerprints(stream, seed, epoch, first_state) for _ in range(READINGS)]
        )
    except Exception:
        return Reread(set(), set())


def _first_fingerprints(stream: Any, seed: int, epoch: int, first_state: Any) -> list[Fingerprint]:
    def read() -> list[Any]:
        set_epoch(stream, epoch)
        if first_state is not None:
            stream.load_state_dict(copy.deepcopy(first_state))
        return list(islice(iter(stream), _READ_AGAIN))

    return [fingerprint(sample) for sample in RandomStream(seed).run(read)]


def collated(batch: list[Any], begin: int, end: int, collate: Collate, seed: int) -> Any:
    """Samples ``begin`` to ``end`` of ``batch``, collated on generators of their own."""
    with isolated():
        seed_all(seed)
        if begin < end:
            return collate(batch[begin:end])
        return empty_batch(lambda count: collate([copy.deepcopy(batch[0]) for _ in range(count)]))


class BatchSource(SampleSource):
    """A DataLoader with ``batch_size=None``: it hands over ready batches, which are cut by rows."""

    kind = "batches"
    same_on_ranks = SAME_STREAM

    def __init__(self, dataloader: DataLoader[Any], cut: BatchCut, seed: int) -> None:
        self.dataloader = dataloader
        self.dataset = dataloader.dataset
        self.fetching = Fetching()  # the DataLoader does it by itself
        self.cut = cut
        self.seed = seed

    @property
    def steps_per_epoch(self) -> int | None:
        """As many as the DataLoader says."""
        return length_of(self.dataloader)

    def reread(self, epoch: int) -> Reread:
        """Read again, in this process, some of what ranks differ in."""
        if not isinstance(self.dataset, IterableDataset):
            return super().reread(epoch)
        return reread_stream(self.dataset, seed_for(self.seed, epoch), epoch)

    def reader(self) -> Reader:
        """Reads the DataLoader as it is, with its own workers."""
        return self._read

    def identity(self) -> dict[str, Any]:
        """What must be the same for a state to fit."""
        return {"seed": self.seed}

    def _read(self, place: LoaderPosition) -> Iterator[Delivery]:
        for part in (self.dataloader.dataset, self.dataloader.sampler):
            set_epoch(part, place.epoch)
        draw = RandomStream(seed_for(self.seed, place.epoch))
        batches = draw.run(lambda: iter(self.dataloader))
        end = object()
        skip = place.offset
        while (batch := draw.run(lambda: next(batches, end))) is not end:
            rows = count_rows(batch)
            if skip >= rows:
                skip -= rows
            elif skip:
                raise DataError(
                    f"position {place.position} falls inside a batch of {rows} that the dataset "
                    "made itself. Such a loader can only stand between its batches."
                )
            else:
                begin, stop = self.cut.share(rows)
                drawn = (("the batch", fingerprint(batch)),) if self.compares else None
                yield Delivery(cut_rows(batch, begin, stop), stop - begin, rows, drawn=drawn)
        if skip:
            raise DataError(
                f"the DataLoader ended {skip} samples before offset {place.offset} of epoch "
                f"{place.epoch}: it is not the one this position was saved with."
            )
