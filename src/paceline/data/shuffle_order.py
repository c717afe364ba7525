"""The global order: a keyed shuffle of ``range(n)`` that is computed, never stored.

Each epoch is a permutation of ``range(n)`` that depends on nothing but ``(n, seed, epoch)``. Any
stretch of it can be drawn on its own: no list of n indices, no start-up cost, so a shuffle of a
billion samples opens, and resumes in its middle, in about a millisecond.

How: a position is split into two halves, and eight rounds of a Feistel network change each half in
turn by a keyed hash of the other. Every round can be undone, so the whole is a permutation of the
``left × 2^k`` grid that holds ``range(n)``; a value that falls in the few cells beyond n is sent
through again until it lands inside ("cycle walking"), which keeps it a permutation of ``range(n)``.
Up to 1024 samples a keyed sort does the same and is uniform by construction.

The numbers are part of the interface: a run resumes on another machine or a later version at the
next sample. All arithmetic stays within 63 bits, so nothing depends on how integers overflow.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Protocol, runtime_checkable

import torch

from paceline.data.randomness import seed_for
from paceline.errors import DataError

MAX_SAMPLES = 2**62
_SMALL = 1024
_ROUNDS = 8
_MASK = 0xFFFFFFFF
# Two odd multipliers below 2^31 with good avalanche (Chris Wellons' hash prospector).
_MULTIPLIERS = (0x2C1B3C6D, 0x297A2D39)


class Order:
    """The order of ``n`` samples, epoch by epoch; ``shuffle=False`` counts from 0 to n-1."""

    def __init__(self, n: int, seed: int = 0, shuffle: bool = True) -> None:
        if not isinstance(n, int) or isinstance(n, bool):
            raise DataError(f"Order: n={n!r} must be a whole number: how many samples there are.")
        if not 1 <= n <= MAX_SAMPLES:
            raise DataError(f"Order: n={n} must be from 1 to 2^62: an order needs a sample.")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise DataError(f"Order: seed={seed!r} must be a whole number, like 0.")
        self.n = n
        self.seed = seed
        self.shuffle = shuffle
        self._right_bits = (n - 1).bit_length() // 2
        self._left_size = -(-n >> self._right_bits)  # n / 2^right_bits, rounded up

    def indices(self, epoch: int, start: int, stop: int) -> torch.Tensor:
        """The sample indices at positions ``start`` to ``stop`` (excluded) of ``epoch``, int64."""
        if not 0 <= start <= stop <= self.n:
            raise DataError(
                f"Order: positions {start} to {stop} must lie within 0 to n={self.n}, in order."
            )
        return self.at(epoch, torch.arange(start, stop, dtype=torch.int64))

    def at(self, epoch: int, positions: torch.Tensor) -> torch.Tensor:
        """The sample indices at these ``positions`` (int64, each from 0 to n-1) of ``epoch``."""
        if not isinstance(epoch, int) or epoch < 0:
            raise DataError(f"Order: epoch={epoch!r} must be a whole number, 0 or more.")
        if not self.shuffle:
            return positions.clone()
        keys = round_keys(self.n, self.seed, epoch)
        if self.n <= _SMALL:
            return self._sorted(keys)[positions]
        values = self._network(positions, keys)
        while True:
            outside = (values >= self.n).nonzero().squeeze(1)
            if outside.numel() == 0:
                return values
            values[outside] = self._network(values[outside], keys)

    def identity(self) -> dict[str, Any]:
        """What must be the same for a position to mean the same sample: by name, for a state."""
        return {"samples_per_epoch": self.n, "seed": self.seed, "shuffle": self.shuffle}

    def probes(self, epoch: int, count: int) -> list[int]:
        """``count`` positions whose samples ranks compare; others each epoch."""
        return sorted({seed_for(self.seed, epoch, at, 2) % self.n for at in range(count)})

    def _sorted(self, keys: list[int]) -> torch.Tensor:
        """A small permutation at one go: sort the indices by their keyed hash.

        The hash is one-to-one on 32 bits, so there are no ties for a sort to break its own way.
        """
        hashed = torch.arange(self.n, dtype=torch.int64)
        for turn in range(0, 6, 2):
            hashed = keyed_hash(hashed, keys[turn], keys[turn + 1])
        return hashed.argsort()

    def _network(self, positions: torch.Tensor, keys: list[int]) -> torch.Tensor:
        left = positions >> self._right_bits
        right = positions & ((1 << self._right_bits) - 1)
        for turn in range(0, 2 * _ROUNDS, 4):
            # Multiply and shift maps 32 hashed bits evenly onto 0 … left_size-1.
            shift = (keyed_hash(right, keys[turn], keys[turn + 1]) * self._left_size) >> 32
            left = (left + shift) % self._left_size
            flips = keyed_hash(left, keys[turn + 2], keys[turn + 3]) >> (32 - self._right_bits)
            right = right ^ flips
        return (left << self._right_bits) | right


@runtime_checkable
class HasOrder(Protocol):
    """A dataset that says itself in which order its samples are best read."""

    def paceline_order(self, seed: int, shuffle: bool) -> Order:
        """The order of its samples by ``seed``; without ``shuffle``, from the first to the last."""


def order_of(dataset: Any, seed: int, shuffle: bool) -> Order:
    """The order in which the samples of a map-style ``dataset`` are read."""
    if isinstance(dataset, HasOrder):
        return dataset.paceline_order(seed, shuffle)
    return Order(len(dataset), seed, shuffle)


def round_keys(n: int, seed: int, epoch: int) -> list[int]:
    """Two 32-bit keys a round; with n among them, so that a set and its subset differ in order."""
    text = f"paceline order {n} {seed} {epoch}"
    digest = blake2b(text.encode(), digest_size=8 * _ROUNDS).digest()
    return [int.from_bytes(digest[at : at + 4], "little") for at in range(0, len(digest), 4)]


def keyed_hash(values: Any, first_key: Any, second_key: Any) -> Any:
    """A keyed one-to-one hash of 32-bit values, in int64 tensors or arrays."""
    values = values ^ first_key
    values = values ^ (values >> 15)
    values = (values * _MULTIPLIERS[0]) & _MASK
    values = values ^ second_key
    values = values ^ (values >> 12)
    values = (values * _MULTIPLIERS[1]) & _MASK
    return values ^ (values >> 15)
