"""The loader: this rank's share of each global batch, from any position, in any world."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from paceline.data.slices import Share
from paceline.data.source import Place, Reader, Source
from paceline.errors import DataError, UnknownLength


class Loader:
    """Iterating yields this rank's share of each global batch, up to the end of the epoch.

    Iterating again yields the next epoch; after a ``break`` it goes on with the next batch. Made by
    :func:`paceline.data.loader`. Where it stands is one number, :attr:`position`: batches that
    workers have fetched ahead do not count until they are handed to you.

    A rank whose share is empty gets a batch of zero samples: same structure, tensors of shape
    ``(0, …)``. Worker processes live from epoch to epoch; ``break``, an error, :meth:`close`, or
    leaving a ``with`` block ends them.
    """

    def __init__(self, source: Source, global_batch: int | None) -> None:
        self._source = source
        self._global_batch = global_batch
        self._place = Place()
        self._share = Share(0, 0, 0)
        self._reader: Reader | None = None
        self._turn = 0

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
        return self._global_batch

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples in an epoch over all ranks; ``None`` where the dataset does not say."""
        return self._source.samples_per_epoch

    @property
    def steps_per_epoch(self) -> int | None:
        """Global batches in a whole epoch; ``None`` where the dataset does not say."""
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
        for delivery in self._reader(self._place):
            epoch = self._place.epoch
            self._place = self._source.after(self._place, delivery)
            self._share = Share(delivery.samples, delivery.global_samples, epoch)
            yield delivery.batch
            if turn != self._turn:
                raise DataError(
                    "this iteration is over: the loader was sent elsewhere by seek, "
                    "load_state_dict, close or a second iteration. A loader has one position; "
                    "start a new loop, or make a second loader."
                )

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
        """What :meth:`load_state_dict` needs to go on with the next sample, in any world.

        Plain numbers, the same on every rank (a stream that saves itself adds its own state).
        """
        source = self._source
        return {"kind": source.kind, **source.identity(), **source.save(self._place)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go where ``state`` says; the world and the batch size may be others than then.

        Refused with :class:`DataError`, leaving the loader as it was, when the state belongs to
        another dataset length, seed or kind of data.
        """
        here = {"kind": self._source.kind, **self._source.identity()}
        saved = _check_state(state, here)
        self._go_to(self._source.restore(saved))

    def close(self) -> None:
        """End the worker processes, if there are any. Iterating again starts new ones."""
        self._turn += 1
        self._reader = None

    def _go_to(self, place: Place) -> None:
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
    if extra := sorted(saved.keys() - expected - {"state"}):
        raise DataError(f"load_state_dict: {extra[0]!r} is no part of a loader's state.")
    for name in sorted(expected):
        if not isinstance(saved[name], int) or isinstance(saved[name], bool) or saved[name] < 0:
            raise DataError(
                f"load_state_dict: {name}={saved[name]!r} must be a whole number, 0 or more."
            )
    return saved
