"""What a loader reads from: the part that differs between datasets, streams and DataLoaders."""

from __future__ import annotations

import dataclasses
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, default_collate

from paceline.data.batch_shares import BatchCut, steps_per_epoch
from paceline.data.rank_comparison import Drawn, Reread

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Fetching:
    """How samples are fetched and made into batches.

    ``pin_memory=None`` pins where the rank's device is a GPU. ``options`` are further arguments for
    torch's DataLoader, taken over from an existing one.
    """

    workers: int = 0
    pin_memory: bool | None = False
    collate_fn: Collate = default_collate
    options: dict[str, Any] = field(default_factory=dict)

    def dataloader_options(self) -> dict[str, Any]:
        """The arguments for the DataLoader that does the fetching."""
        return {
            **self.options,
            "num_workers": self.workers,
            "pin_memory": bool(self.pin_memory),
            "collate_fn": as_it_is,
        }


def as_it_is(batch: Any) -> Any:
    """The collate function for batches that are already made."""
    return batch


@dataclass(frozen=True)
class LoaderPosition:
    """Where a loader stands: ``offset`` samples into ``epoch``, ``position`` samples in all.

    ``state`` is what a stream with a ``state_dict`` needs beside the numbers.
    """

    epoch: int = 0
    offset: int = 0
    position: int = 0
    state: Any = field(default=None, compare=False)


class Delivery(NamedTuple):
    """One global batch as it reaches this rank: its share of it, collated.

    ``last`` is set where the source already knows that the epoch ends here. ``drawn`` tells of the
    whole global batch, alike on all ranks.
    """

    batch: Any
    samples: int
    global_samples: int
    state: Any = None
    last: bool = False
    drawn: Drawn | None = None


def set_epoch(part: Any, epoch: int) -> None:
    """Let a dataset or sampler know which epoch is read, if it wants to."""
    if hasattr(part, "set_epoch"):
        part.set_epoch(epoch)


def read_through(dataloader: DataLoader[Any]) -> Iterator[Delivery]:
    """Iterate ``dataloader``; after an error its workers end as soon as it is let go of."""
    try:
        yield from dataloader
    except Exception as error:
        if dataloader.num_workers:
            # Whoever holds the error would hold torch's iterator, and with it the workers.
            traceback.clear_frames(error.__traceback__)
        raise


Reader = Callable[[LoaderPosition], Iterator[Delivery]]
"""Gives this rank's share of each global batch from a place to the end of its epoch."""


class SampleSource(ABC):
    """Where global batches come from, and how places in it are counted.

    The methods here serve sources that are read in sequence, whose epochs may differ in length.
    """

    kind: str
    """What the source is, as its state names it: a state of one kind does not fit another."""

    samples_per_epoch: int | None = None
    cut: BatchCut
    """How the data is cut, for the layout that reads it; ``follow`` sets another."""

    dataset: Any
    fetching: Fetching
    compares = False
    """Whether ranks compare what they read: then deliveries tell of it."""
    same_on_ranks: str
    order_is_ours = False

    @property
    def steps_per_epoch(self) -> int | None:
        """Global batches in an epoch, where that is known."""
        if self.samples_per_epoch is None:
            return None
        return steps_per_epoch(self.samples_per_epoch, self.cut.global_batch, self.cut.drop_last)

    def follow(self, cut: BatchCut) -> None:
        """Cut the data this way from now on."""
        self.cut = cut

    def follow_device(self, on_gpu: bool) -> None:
        """Batches go to a GPU, or not: they come in pinned memory then, unless it was said."""
        if self.fetching.pin_memory is None:
            self.fetching = dataclasses.replace(self.fetching, pin_memory=on_gpu)

    @property
    def described(self) -> str:
        """The data, as an error names it."""
        return type(self.dataset).__name__

    def reread(self, epoch: int) -> Reread:
        """Read again, in this process, some of what ranks differ in."""
        return Reread(set(), set())

    @abstractmethod
    def reader(self) -> Reader:
        """Something that reads; it holds the worker processes, and letting go of it ends them.

        A reader must hold the source, never the other way round, or it would not be let go of.
        """

    def place(self, position: int) -> LoaderPosition:
        """The place ``position`` samples from the start of the first epoch."""
        if self.samples_per_epoch is None:
            return LoaderPosition(0, position, position)
        return LoaderPosition(*divmod(position, self.samples_per_epoch), position)

    def after(self, place: LoaderPosition, delivery: Delivery) -> LoaderPosition:
        """The place once ``delivery`` has been handed to the user."""
        count = delivery.global_samples
        reached = LoaderPosition(
            place.epoch, place.offset + count, place.position + count, delivery.state
        )
        return self.next_epoch(reached) if delivery.last else reached

    def next_epoch(self, place: LoaderPosition) -> LoaderPosition:
        """The start of the epoch that follows ``place``."""
        return LoaderPosition(place.epoch + 1, 0, place.position)

    def identity(self) -> dict[str, Any]:
        """What must be the same for a state to fit: by name, as the user knows it."""
        return {}

    def save(self, place: LoaderPosition) -> dict[str, Any]:
        """``place`` as plain data."""
        return {k: v for k, v in dataclasses.asdict(place).items() if v is not None}

    def restore(self, saved: dict[str, Any]) -> LoaderPosition:
        """The place that ``save`` wrote."""
        return LoaderPosition(**saved)
