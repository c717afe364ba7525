"""The order of samples that lie in shards: shuffled, and yet read from front to back.

Every epoch is a permutation of all samples that depends on nothing but the shards' sizes, the seed
and the epoch:

1. The shards are put in a new order, and their samples counted through.
2. This sequence is cut into ``lanes`` of equal length (the shard at a cut belongs to two of them).
3. The lanes take turns, each with a ``chunk`` of samples; only the last turn may be short.
4. Within a shard, samples are shuffled in windows of ``window``.

So position p lies in lane ``(p // chunk) % lanes``: which sample it is follows from a few divisions
and one look into the sizes, for any position. Whoever reads every k-th stretch of positions reads
some lanes from front to back and no others, where the numbers divide: ``global_batch * workers``
divides ``lanes * chunk``, and ``chunk * ranks`` divides ``global_batch``.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.data.shuffle_order import Order, keyed_hash, round_keys
from paceline.errors import DataError

MOST_LANES = 64
WINDOW = 128
_MOST_CHUNK = 16
_LEAST_TURNS = 16
"""Turns of the lanes in an epoch, in which chunks of a few samples would else be too long."""
_LOW = 0xFFFFFFFF
_WINDOWS_KEPT = 4
"""Windows whose permutations are kept, for each lane."""

Ints = npt.NDArray[np.int64]


class ShardOrder(Order):
    """The order of the samples of shards with these ``counts``, epoch by epoch.

    Sample i is the i-th of all shards one after the other. ``shuffle=False`` counts through them.
    """

    def __init__(
        self,
        counts: Sequence[int],
        seed: int = 0,
        shuffle: bool = True,
        *,
        lanes: int | None = None,
        chunk: int | None = None,
        window: int = WINDOW,
        names: Sequence[str] = (),
    ) -> None:
        super().__init__(sum(counts), seed, shuffle)
        self.lanes = default_lanes(len(counts)) if lanes is None else lanes
        if chunk is None:
            chunk = min(_MOST_CHUNK, self.n // (_LEAST_TURNS * self.lanes))
        # Few samples would else all fall to the first lanes.
        self.chunk = max(1, min(chunk, self.n // self.lanes))
        self.window = window
        self._counts = np.array(counts, dtype=np.int64)
        self._starts = self._counts.cumsum() - self._counts
        self._names = tuple(names)
        self._epoch: tuple[int, Ints, Ints] | None = None
        self._moved: dict[int, Ints] = {}

    def at(self, epoch: int, positions: torch.Tensor) -> torch.Tensor:
        """The sample indices at these ``positions`` (int64, each from 0 to n-1) of ``epoch``."""
        if not isinstance(epoch, int) or epoch < 0:
            raise DataError(f"ShardOrder: epoch={epoch!r} must be a whole number, 0 or more.")
        if not self.shuffle:
            return positions.clone()
        shards, ends = self._shards(epoch)
        counted = self._through_lanes(positions.numpy())
        slot = np.searchsorted(ends, counted, side="right")
        shard = shards[slot]
        inside = counted - (ends[slot] - self._counts[shard])
        return torch.from_numpy(self._starts[shard] + self._in_windows(epoch, shard, inside))

    def lane(self, positions: Ints) -> Ints:
        """The lane that each of these positions lies in."""
        return (positions // self.chunk) % self.lanes

    def identity(self) -> dict[str, Any]:
        """What must be the same for a position to mean the same sample."""
        about = (self._counts.tolist(), self.lanes, self.chunk, self.window, self._names)
        digest = blake2b(repr(about).encode(), digest_size=6).hexdigest()
        return {**super().identity(), "shards": f"{len(self._counts)}, {digest}"}

    def probes(self, epoch: int, count: int) -> list[int]:
        """The first samples of the epoch: others would lie in shards that nobody opens yet."""
        return self.at(epoch, torch.arange(min(count, self.n))).tolist()

    def _shards(self, epoch: int) -> tuple[Ints, Ints]:
        """The shards as this epoch takes them, and where each ends when counted through."""
        if self._epoch is None or self._epoch[0] != epoch:
            number = len(self._counts)
            shards = Order(number, self.seed).indices(epoch, 0, number).numpy()
            self._epoch = (epoch, shards, self._counts[shards].cumsum())
            self._moved = {}
        return self._epoch[1:]

    def _through_lanes(self, positions: Ints) -> Ints:
        """Where in the sequence of all shards each position reads."""
        turn = self.lanes * self.chunk
        whole, rest = divmod(self.n, turn)
        lane = self.lane(positions)
        start = lane * (whole * self.chunk) + np.minimum(lane * self.chunk, rest)
        return start + positions // turn * self.chunk + positions % self.chunk

    def _in_windows(self, epoch: int, shard: Ints, inside: Ints) -> Ints:
        """Places in shards, each moved to another place of its window."""
        if self.window == 1:
            return inside
        number = inside // self.window
        first = self._starts[shard] + number * self.window
        windows, one_of_each, which = np.unique(first, return_index=True, return_inverse=True)
        ends = (self._starts[shard] + self._counts[shard])[one_of_each]
        sizes = np.minimum(ends - windows, self.window)
        moved = self._permutations(epoch, windows, sizes)
        return number * self.window + moved[which, inside % self.window]

    def _permutations(self, epoch: int, windows: Ints, sizes: Ints) -> Ints:
        """A permutation for each window, by its first sample: one row each.

        Lanes come back to a window several times, so the last ones are kept.
        """
        if len(self._moved) > _WINDOWS_KEPT * self.lanes:
            self._moved = {}
        missing = [at for at, first in enumerate(windows.tolist()) if first not in self._moved]
        if missing:
            fresh = self._permute(epoch, windows[missing], sizes[missing])
            self._moved.update(zip(windows[missing].tolist(), fresh, strict=True))
        return np.stack([self._moved[first] for first in windows.tolist()])

    def _permute(self, epoch: int, windows: Ints, sizes: Ints) -> Ints:
        """Places sorted by a keyed hash, which is one-to-one, so that there are no ties."""
        keys = round_keys(self.n, self.seed, epoch)
        low, high = windows & _LOW, windows >> 32
        own = keyed_hash(low, keys[0], keys[1]) ^ keyed_hash(high, keys[2], keys[3])
        other = keyed_hash(own, keys[4], keys[5])
        places = np.arange(self.window)[None, :]
        hashed = keyed_hash(places, own[:, None], other[:, None])
        hashed = keyed_hash(hashed, other[:, None], keys[6])
        beyond = places >= sizes[:, None]
        return np.where(beyond, places + (1 << 40), hashed).argsort(axis=1)


def default_lanes(shards: int) -> int:
    """As many lanes as there are shards, up to 64: a power of two, which divides most batches."""
    return 1 << (min(shards, MOST_LANES).bit_length() - 1)
