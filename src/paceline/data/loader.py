"""The loader: this rank's share of each global batch, from any position, in any world."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from paceline.data.batch_layout import check_shares, remember
from paceline.data.batch_shares import BatchCut, Share
from paceline.data.rank_comparison import RankComparison
from paceline.data.rank_sharded_stream import RankStreamSource
from paceline.data.sample_source import LoaderPosition, Reader, SampleSource
from paceline.errors import DataError, UnknownLength
from paceline.layout import Layout
from paceline.layout.batch import BatchSizes
from paceline.world import World


@dataclass(frozen=True)
class Sharing:
    """What was said of how the data is shared out; the rest follows from world and engine."""

    drop_last: bool = False
    fixed: tuple[int, int] | None = None
    """Rank and size, given by hand: no world is asked."""
    layout: Layout | None = None
    compare: bool = True
    batch_size: int | None = None
    """The batch size of a DataLoader that was taken as the global batch without a word."""


class Loader:
    """Iterating yields this rank's share of each global batch, up to the end of the epoch.

    Iterating again yields the next epoch; after a ``break`` it goes on with the next batch. Made by
    ``paceline.data.loader``. Where it stands is one number, ``position``: batches that
    workers have fetched ahead do not count until they are handed to you.

    A rank whose share is empty gets a batch of zero samples: same structure, tensors of shape
    ``(0, …)``. Worker processes live from epoch to epoch; ``break``, an error, ``close``, or
    leaving a ``with`` block ends them.
    """

    def __init__(self, source: SampleSource, sizes: BatchSizes, sharing: Sharing) -> None:
        self._source, self._sizes, self._sharing = source, sizes, sharing
        self._global_batch: int | None = None
        self._recorded_batch: int | None = None
        self._microbatch: int | None = None
        self._layout = sharing.layout
        self._bound: Any = None
        self._comparison: RankComparison | None = None
        self._every_batch = True
        # Nobody waits for others over the first batch: one rank may look at it by itself.
        self._all_ranks_come = False
        self._note: str | None = None
        self._place = LoaderPosition()
        self._share = Share(0, 0, 0)
        self._cut = BatchCut(1, sharing.drop_last)
        self._reader: Reader | None = None
        self._turn = 0
        if sharing.fixed is not None:
            self._bind(*sharing.fixed)

    def follow(self, layout: Layout) -> None:
        """Share batches out as ``layout`` does, that of the engine which is to read this loader.

        Refused where the loader was made with another ``layout``.
        """
        if self._sharing.layout is not None:
            check_shares("the loader was made", self._sharing.layout, layout)
        else:
            self._layout = layout

    def expect_all_ranks(self, *, every_batch: bool = True) -> None:
        """Every rank will iterate: compare what they draw from the first batch on.

        ``every_batch=False`` spares ranks that train alone waiting for each other over each batch
        of a stream: they compare batches 1, 2, 4, 8, ….
        """
        self._all_ranks_come, self._every_batch = True, every_batch
        if self._comparison is not None:
            self._comparison.every_batch = every_batch

    def take_note(self) -> str | None:
        """What the user should know of the batch size, once; else logged when it is iterated."""
        self._ready()
        note, self._note = self._note, None
        return note

    def _ready(self) -> None:
        """Know which share is this rank's: of the layout it follows, in the world it is in."""
        if self._sharing.fixed is not None:
            return
        world = World.current()
        layout = self._layout
        if layout is None or (self._sharing.layout is None and layout.world_size != world.size):
            layout = Layout(dp=world.size)
        layout.check_world(world.size)
        if self._bound == (world, layout):
            return
        self._bind(layout.coordinate(world.rank).dp, layout.dp, world, layout)

    def _bind(
        self, rank: int, size: int, world: World | None = None, layout: Layout | None = None
    ) -> None:
        # With a recorded batch the ranks are others than the numbers were chosen for.
        sizes = self._sizes.on(size, exact=self._recorded_batch is None)
        total = self._recorded_batch or sizes.global_batch
        self._global_batch, self._microbatch = total, sizes.microbatch
        source = self._source
        self._cut = BatchCut(total or 1, self._sharing.drop_last, rank, size)
        source.follow(self._cut)
        source.follow_device(
            torch.cuda.is_available() if world is None else world.device.type == "cuda"
        )
        if isinstance(source, RankStreamSource):
            source.layout = layout
        self._comparison = None
        if world is not None and self._sharing.compare and world.backend not in ("none", "fake"):
            self._comparison = RankComparison(world, source, f"loader over {source.described}")
            self._comparison.every_batch = self._every_batch
        source.compares = self._comparison is not None
        if self._bound is None and (world is None or world.is_main):
            self._note = self._note_on_batch(size)
        self._bound = None if layout is None else (world, layout)
        self._reader = None

    def _note_on_batch(self, ranks: int) -> str | None:
        batch = self._sharing.batch_size
        if batch is None or ranks == 1:
            return None
        each = batch / ranks
        return (
            f"the DataLoader's batch_size={batch} is the global batch: {each:g} samples on each of "
            f"{ranks} data-parallel ranks. For {batch} on each, pass per_device_batch={batch}; "
            f"if it is meant so, pass global_batch={batch}."
        )

    def __getstate__(self) -> dict[str, Any]:
        """As it travels to other processes, which are ranks of another world."""
        here = {"_bound": None, "_comparison": None, "_reader": None}
        return {**self.__dict__, **here}

    @property
    def position(self) -> int:
        """Samples of the global order delivered so far, over all epochs and ranks."""
        return self._place.position

    @property
    def epoch(self) -> int:
        """The epoch of the next sample; ``share.epoch`` is that of the batch last yielded."""
        return self._place.epoch

    @property
    def share(self) -> Share:
        """How much of the global batch last yielded is this rank's."""
        return self._share

    @property
    def global_batch(self) -> int | None:
        """Samples a step takes over all ranks; ``None`` where the data makes its own batches."""
        self._ready()
        return self._global_batch

    @property
    def microbatch(self) -> int | None:
        """The most samples a rank is to put through its model at once, where that was said.

        ``per_device_batch`` and ``accumulate`` say it: give it to the engine as its ``microbatch``.
        """
        self._ready()
        return self._microbatch

    @property
    def passes(self) -> int:
        """In how many passes of at most ``microbatch`` samples the largest share goes."""
        total, most = self.global_batch, self.microbatch
        if total is None or most is None:
            return 1
        return math.ceil(math.ceil(total / self._source.cut.size) / most)

    @property
    def drops_last(self) -> bool:
        """Whether a last batch that is short of ``global_batch`` is left out."""
        return self._sharing.drop_last

    @property
    def is_sharded_by_rank(self) -> bool:
        """Whether each data-parallel rank reads a stream of its own: there is no common order."""
        return isinstance(self._source, RankStreamSource)

    @property
    def layout(self) -> Layout | None:
        """The layout that batches are shared out for; ``None`` with a ``rank`` and ``size``."""
        self._ready()
        return None if self._bound is None else self._bound[1]

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples in an epoch over all ranks; ``None`` where the dataset does not say."""
        return self._source.samples_per_epoch

    @property
    def steps_per_epoch(self) -> int | None:
        """Global batches in a whole epoch; ``None`` where the dataset does not say."""
        self._ready()
        return self._source.steps_per_epoch

    def __len__(self) -> int:
        """Global batches in a whole epoch, wherever in one the loader stands."""
        if self.steps_per_epoch is None:
            raise UnknownLength(
                "this loader reads a stream without a length, so its steps per epoch are not "
                "known: give the dataset a __len__, or count in steps."
            )
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        self._ready()
        if (note := self.take_note()) is not None:
            logging.getLogger("paceline").warning(note)
        self._turn += 1
        turn = self._turn
        ended = False
        try:
            started = self._place
            yield from self._rest_of_epoch(turn)
            if self._place == started and started.offset > 0:
                # Resumed at the very end of an epoch: there was nothing left of it.
                self._place = self._source.next_epoch(started)
                started = self._place
                yield from self._rest_of_epoch(turn)
            if self._place == started:
                raise DataError(
                    f"epoch {started.epoch} gave no batch: the dataset is empty, its iterator can "
                    "be used only once, or drop_last dropped a first batch that was short of "
                    f"global_batch={self.global_batch}."
                )
            if self._place.epoch == started.epoch:
                self._place = self._source.next_epoch(self._place)
            ended = True
        finally:
            if not ended and turn == self._turn:
                self.close()

    def _rest_of_epoch(self, turn: int) -> Iterator[Any]:
        if self._reader is None:
            self._reader = self._source.reader()
        comparison, layout = self._comparison, self.layout
        if comparison is not None:
            comparison.begin(self._facts())
        for delivery in self._reader(self._place):
            epoch, offset = self._place.epoch, self._place.offset
            if comparison is not None:
                comparison.drew(
                    delivery.drawn,
                    delivery.global_samples,
                    place=(epoch, offset),
                    wait=self._all_ranks_come,
                )
            self._place = self._source.after(self._place, delivery)
            self._share = Share(delivery.samples, delivery.global_samples, epoch)
            if self._cut.size > 1 or (layout is not None and layout.world_size > 1):
                start, end = self._cut.share(delivery.global_samples)
                known = end - start == delivery.samples  # a stream for each rank goes its own way
                remember(delivery.batch, layout, start if known else None)
            yield delivery.batch
            self._all_ranks_come = True
            if turn != self._turn:
                raise DataError(
                    "this iteration is over: the loader was sent elsewhere by seek, "
                    "load_state_dict, close or a second iteration. A loader has one position; "
                    "start a new loop, or make a second loader."
                )
        if comparison is not None:
            comparison.ended()

    def _facts(self) -> dict[str, Any]:
        """What must be the same on all ranks for them to read the same data."""
        source, place = self._source, self._place
        return {
            "kind": source.kind,
            "dataset": source.described,
            "samples_per_epoch": source.samples_per_epoch,
            **source.identity(),
            "global_batch": self._global_batch,
            "drop_last": self._sharing.drop_last,
            "layout": str(self.layout),
            "epoch": place.epoch,
            "offset": place.offset,
            "position": place.position,
        }

    def seek(self, position: int) -> None:
        """Go to ``position``: the next batch starts at that sample of the global order.

        At once for a dataset with a length; with ``drop_last``, a position in what an epoch leaves
        out is the start of the next. A stream, or a DataLoader's own sampler, is read again from
        the start of the epoch up to there.
        """
        if not isinstance(position, int) or isinstance(position, bool) or position < 0:
            raise DataError(
                f"seek: position={position!r} must be a whole number, 0 or more: samples "
                "delivered since the start of the first epoch."
            )
        self._go_to(self._source.place(position))

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` needs to go on with the next sample, in any world.

        Plain numbers, the same on every rank (a stream that saves itself adds its own state).
        A global batch that followed from the number of ranks is among them: it stays what it was.
        """
        self._ready()
        source = self._source
        state = {"kind": source.kind, **source.identity(), **source.save(self._place)}
        if self._sizes.follows_ranks:
            state["global_batch"] = self._global_batch
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go where ``state`` says; the world and the batch size may be others than then.

        Refused with ``DataError``, leaving the loader as it was, when the state belongs to
        another dataset length, seed or kind of data.
        """
        self._ready()
        here = {"kind": self._source.kind, **self._source.identity()}
        saved = _check_state(state, here)
        recorded = saved.pop("global_batch", None)
        place = self._source.restore(saved)
        if self._sizes.follows_ranks and recorded not in (None, self._global_batch):
            self._keep_batch(recorded)
        self._go_to(place)

    def _keep_batch(self, recorded: int) -> None:
        """Go on with the global batch of the state, whatever it would be on these ranks."""
        here = self._global_batch
        self._recorded_batch, self._bound = recorded, None
        if self._sharing.fixed is not None:
            self._bind(*self._sharing.fixed)
        self._ready()
        self._note = (
            f"the run goes on with global_batch={recorded}, as it began; per_device_batch and "
            f"accumulate would make {here} on the ranks there are now."
        )

    def close(self) -> None:
        """End the worker processes, if there are any. Iterating again starts new ones."""
        self._turn += 1
        self._reader = None

    def _go_to(self, place: LoaderPosition) -> None:
        self._turn += 1
        self._place = place

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_state(state: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """The part of ``state`` that says where; the part that says what must match ``here``."""
    if not isinstance(state, Mapping):
        raise DataError(
            f"load_state_dict: got a {type(state).__name__}, but needs the dict that state_dict "
            "gave."
        )
    for name, value in here.items():
        if name not in state:
            raise DataError(
                f"load_state_dict: the state has no {name!r}, only {sorted(map(str, state))}: it "
                "is not the state of a loader."
            )
        if state[name] != value:
            raise DataError(
                f"load_state_dict: the state was saved with {name}={state[name]!r}, but this "
                f"loader has {name}={value!r}, so its position would mean other samples. Make the "
                f"loader with {name}={state[name]!r}, or go to a position of your own with seek."
            )
    saved = {name: value for name, value in state.items() if name not in here}
    expected = {"position"} if here["kind"] == "order" else {"position", "epoch", "offset"}
    if missing := sorted(expected - saved.keys()):
        raise DataError(f"load_state_dict: the state has no {missing[0]!r}: it is not complete.")
    if extra := sorted(saved.keys() - expected - {"state", "global_batch"}):
        raise DataError(f"load_state_dict: {extra[0]!r} is no part of a loader's state.")
    for name in sorted(expected | (saved.keys() & {"global_batch"})):
        if not isinstance(saved[name], int) or isinstance(saved[name], bool) or saved[name] < 0:
            raise DataError(
                f"load_state_dict: {name}={saved[name]!r} must be a whole number, 0 or more."
            )
    return saved
