"""Several datasets as one, in fixed proportions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from paceline.data.arguments import import_function, length_of
from paceline.data.randomness import seed_for
from paceline.data.shuffle_order import Order, order_of
from paceline.errors import DataError

_LEAST_WINDOW = 256
_WINDOWS_KEPT = 8
Ints = npt.NDArray[np.int64]


class Mixture(Dataset[Any]):
    """Samples of several datasets in the proportions of their weights.

    Each dataset goes through its own epochs, in its own order: all of its samples come once before
    any comes again. Samples that were drawn of each are never more than one away from the
    weights' proportions at the end of each window of 256 samples or more; within a window their
    order is shuffled.
    """

    def __init__(self, sources: Mapping[str, tuple[Any, Fraction]], samples_per_epoch: int) -> None:
        self.datasets = {name: dataset for name, (dataset, _) in sources.items()}
        self.weights = {name: weight for name, (_, weight) in sources.items()}
        self._datasets = list(self.datasets.values())
        self._sizes = [len(dataset) for dataset in self._datasets]
        self._starts = [0, *accumulate(self._sizes)]
        self._samples_per_epoch = samples_per_epoch

    def __len__(self) -> int:
        return self._samples_per_epoch

    def __getitem__(self, index: int) -> Any:
        # Where a dataset begins anew within an epoch, its samples have further numbers.
        index %= self._starts[-1]
        source = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._datasets[source][index - self._starts[source]]

    def paceline_order(self, seed: int, shuffle: bool) -> Order:
        """The order in which a loader reads the samples."""
        orders = [
            order_of(dataset, seed_for(seed, number), shuffle)
            for number, dataset in enumerate(self._datasets)
        ]
        return MixtureOrder(orders, list(self.weights.values()), len(self), seed, shuffle)


class MixtureOrder(Order):
    """Which sample of which dataset comes at each position, over all epochs.

    ``index = number of times it was read in this epoch * all samples + its place among them``.
    """

    def __init__(
        self,
        orders: Sequence[Order],
        weights: Sequence[Fraction],
        samples_per_epoch: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        super().__init__(samples_per_epoch, seed, shuffle)
        self._orders = list(orders)
        self._starts = np.array([0, *accumulate(order.n for order in orders)])
        common = math.lcm(*(weight.denominator for weight in weights))
        parts = [int(weight * common) for weight in weights]
        self._total = sum(parts)
        self._parts = [0, *accumulate(parts)]
        # Every dataset has one sample or more in each window: then none is ever ahead by two.
        self.window = max(_LEAST_WINDOW, -(-self._total // min(parts)))
        self._known: dict[int, tuple[Ints, Ints]] = {}
        self._within = Order(self.window, seed_for(seed, len(parts), 3), shuffle)

    def at(self, epoch: int, positions: torch.Tensor) -> torch.Tensor:
        """The sample indices at these ``positions`` of ``epoch``."""
        if not isinstance(epoch, int) or epoch < 0:
            raise DataError(f"MixtureOrder: epoch={epoch!r} must be a whole number, 0 or more.")
        absolute = positions.numpy() + epoch * self.n
        source, drawn = self._drawn(absolute)
        indices = np.empty_like(absolute)
        for number, order in enumerate(self._orders):
            here = np.flatnonzero(source == number)
            if len(here):
                before = self._count(epoch * self.n, number) // order.n
                indices[here] = self._of_source(number, order, drawn[here], before)
        return torch.from_numpy(indices)

    def _of_source(self, number: int, order: Order, drawn: Ints, before: int) -> Ints:
        """The indices of samples of one dataset, of which ``drawn`` were drawn before each."""
        epochs, places = np.divmod(drawn, order.n)
        local = np.empty_like(drawn)
        for epoch in np.unique(epochs).tolist():
            these = epochs == epoch
            local[these] = order.at(epoch, torch.from_numpy(places[these])).numpy()
        return (epochs - before) * self._starts[-1] + self._starts[number] + local

    def _drawn(self, absolute: Ints) -> tuple[Ints, Ints]:
        """The dataset at each position, and how many of its samples came before."""
        source, drawn = np.empty_like(absolute), np.empty_like(absolute)
        windows, places = np.divmod(absolute, self.window)
        for window in np.unique(windows).tolist():
            these = windows == window
            sources, earlier = self._window(window)
            source[these] = sources[places[these]]
            drawn[these] = earlier[places[these]]
        return source, drawn

    def _window(self, window: int) -> tuple[Ints, Ints]:
        """The dataset at each place of a window, and how many of its samples came before it."""
        if window in self._known:
            return self._known[window]
        start = window * self.window
        base = [self._count(start, number) for number in range(len(self._orders))]
        upto = [self._count(start + self.window, number) for number in range(len(self._orders))]
        fresh = np.array(upto) - np.array(base)
        laid_out = np.repeat(np.arange(len(fresh)), fresh)
        sources = laid_out[self._within.indices(window, 0, self.window).numpy()]
        earlier = np.empty(self.window, np.int64)
        for number, before in enumerate(base):
            here = np.flatnonzero(sources == number)
            earlier[here] = before + np.arange(len(here))
        if len(self._known) >= _WINDOWS_KEPT:
            self._known = {}
        self._known[window] = (sources, earlier)
        return sources, earlier

    def _count(self, position: int, number: int) -> int:
        """How many of the first ``position`` samples are of dataset ``number``, by its weight.

        Differences of rounded sums add up to ``position`` exactly.
        """
        low, high = self._parts[number], self._parts[number + 1]
        return high * position // self._total - low * position // self._total

    def identity(self) -> dict[str, Any]:
        """What must be the same for a position to mean the same sample."""
        about = ([order.identity() for order in self._orders], self._parts)
        digest = blake2b(repr(about).encode(), digest_size=6).hexdigest()
        return {**super().identity(), "mixture": f"{len(self._orders)}, {digest}"}

    def probes(self, epoch: int, count: int) -> list[int]:
        """The first samples of the epoch: they are read next anyway."""
        return self.at(epoch, torch.arange(min(count, self.n))).tolist()


def mixture(
    datasets: Mapping[str, Any] | Sequence[Any],
    weights: Mapping[str, float] | Sequence[float] | None = None,
    *,
    samples_per_epoch: int | None = None,
) -> Mixture:
    """One dataset out of several, in fixed proportions.

    - ``datasets``: by name, or a list: anything with a length and items, ``paceline.data.shards``
      and other mixtures among them. In a config, ``{target: "package.module:name", args: {…}}``.
    - ``weights``: how often samples of each come, by the same names or in the same order. Any
      positive numbers; by default the datasets' lengths.
    - ``samples_per_epoch``: by default as many as the datasets have together. A dataset that is
      too short for its weight is read again, one that is too long goes on in the next epoch.
    """
    named = _named(datasets)
    given = _weights(named, weights)
    if samples_per_epoch is None:
        samples_per_epoch = sum(len(dataset) for dataset in named.values())
    elif not isinstance(samples_per_epoch, int) or samples_per_epoch < 1:
        raise DataError(
            f"mixture: samples_per_epoch={samples_per_epoch!r} must be a whole number, 1 or more."
        )
    return Mixture({name: (named[name], given[name]) for name in named}, samples_per_epoch)


def _named(datasets: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    pairs = datasets.items() if isinstance(datasets, Mapping) else enumerate(datasets)
    named = {str(name): _built(dataset) for name, dataset in pairs}
    if not named:
        raise DataError("mixture: no dataset was given.")
    for name, dataset in named.items():
        length = length_of(dataset)
        if length is None or not hasattr(dataset, "__getitem__"):
            raise DataError(
                f"mixture: dataset {name!r} is a {type(dataset).__name__}, which has no length or "
                "no items: a stream's end would not be known in advance. Put its samples in files "
                "and give paceline.data.shards."
            )
        if length == 0:
            raise DataError(f"mixture: dataset {name!r} is empty: leave it out.")
    return named


def _built(dataset: Any) -> Any:
    """A dataset that a config describes, or the one that was given."""
    if not isinstance(dataset, Mapping):
        return dataset
    if "target" not in dataset or (extra := sorted(dataset.keys() - {"target", "args"})):
        wrong = "has no 'target'" if "target" not in dataset else f"has {extra[0]!r}"
        raise DataError(
            f"mixture: a dataset that is described {wrong}: give its 'target', an import path, and "
            "'args'."
        )
    return import_function(dataset["target"])(**dataset.get("args", {}))


def _weights(
    named: dict[str, Any], weights: Mapping[str, float] | Sequence[float] | None
) -> dict[str, Fraction]:
    if weights is None:
        weights = {name: len(dataset) for name, dataset in named.items()}
    pairs = weights.items() if isinstance(weights, Mapping) else enumerate(weights)
    given = {str(name): weight for name, weight in pairs}
    if given.keys() != named.keys():
        raise DataError(
            f"mixture: weights for {', '.join(given) or 'nothing'}, but the datasets are "
            f"{', '.join(named)}: give one weight for each."
        )
    for name, weight in given.items():
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight) or weight <= 0:
            raise DataError(
                f"mixture: the weight of {name!r} is {weight!r}, but must be a number above 0."
            )
    # As it is written: 0.1 is a tenth, not the nearest binary number.
    exact = {name: Fraction(str(weight)) for name, weight in given.items()}
    if max(exact.values()) > 1_000_000 * min(exact.values()):
        raise DataError(
            "mixture: one weight is more than a million times another. Leave that dataset out, or "
            "give it more weight."
        )
    return exact
