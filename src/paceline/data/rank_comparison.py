"""Ranks compare what they draw: each must read the same data, of which it then gets its share.

A digest of a few bytes is exchanged between the ranks: where the loader stands and what it is over,
once an iteration; and, where the order is not Paceline's own, what was drawn for each batch. Only
when digests differ do ranks exchange more, and then every one of them raises the same error,
before it takes a step that another rank would not take with it.

Two things are no difference. What a sample draws from a random generator of its own changes from
reading to reading on one rank, too: ranks look, and leave it out. Floating-point values, and images
that were decoded, may differ in their last digits between machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from paceline.data.fingerprints import (
    INDICES,
    Fingerprint,
    Leaf,
    but,
    differing,
    digest,
    digest_of,
    is_among,
)
from paceline.errors import DataError
from paceline.world import World, collectives
from paceline.world.agreement import agree_on_call

Drawn = tuple[tuple[str, Fingerprint], ...]
"""Some samples that were drawn for a batch: what to call each of them, and its fingerprint."""

BATCH, END = "batch", "end"
READINGS = 8
"""How often samples that differ between ranks are read again: a flipped image may be one twice."""


class Compared(Protocol):
    """What a comparison asks of the source it is about."""

    same_on_ranks: str
    """What must be the same on all ranks, and what to do where it is not: for the error."""
    order_is_ours: bool
    """Whether Paceline decides which samples are drawn; else only the samples can tell."""

    def reread(self, epoch: int) -> Reread:
        """Read again, in this process, some of what ranks differ in."""


class Reread(NamedTuple):
    """What reading samples again showed, as paths in a sample."""

    varying: set[str]
    """Values that change from reading to reading: drawn from a random generator."""
    telling: set[str]
    """Values that differ from sample to sample: where they agree, the order does."""


def reread_of(readings: Sequence[Sequence[Fingerprint]]) -> Reread:
    """What it shows that the same samples were read several times."""
    first, *more = readings
    varying = {
        leaf.path
        for reading in more
        for one, two in zip(first, reading, strict=False)
        for leaf, _ in differing(one, two)
    }
    telling = {leaf.path for other in first[1:] for leaf, _ in differing(first[0], other)}
    return Reread(varying, telling)


class _RankReport(NamedTuple):
    facts: dict[str, Any]
    state: str
    drawn: list[Drawn]
    batches: int
    samples: int


class RankComparison:
    """One loader's comparison with its counterparts on the other ranks."""

    def __init__(self, world: World, source: Compared, name: str) -> None:
        self._world, self._source, self._name = world, source, name
        self.every_batch = True
        """Else only after batches 1, 2, 4, 8, … and at the end of an epoch."""
        self._without: frozenset[str] = frozenset()
        self._rough = False
        self._facts: dict[str, Any] = {}
        self._drawn: list[Drawn] = []
        self._batches, self._samples = 0, 0
        self._epoch, self._offset = 0, 0

    def begin(self, facts: dict[str, Any]) -> None:
        """An iteration begins: ``facts`` say what over, and where the loader stands."""
        self._facts, self._drawn, self._batches, self._samples = facts, [], 0, 0

    def drew(
        self, drawn: Drawn | None, samples: int, *, place: tuple[int, int], wait: bool
    ) -> None:
        """A global batch of ``samples`` was drawn at an epoch and offset, ``place``.

        With ``wait`` every rank comes here, and they compare.
        """
        self._batches += 1
        self._epoch, self._offset = place
        self._samples += samples
        if drawn is not None:
            self._drawn.append(drawn)
        due = self.every_batch or self._batches & (self._batches - 1) == 0
        if wait and due and (self._drawn or self._facts):
            self._compare(BATCH)

    def ended(self) -> None:
        """The epoch is over on this rank."""
        if self._facts or not self._source.order_is_ours:
            self._compare(END)

    def _compare(self, state: str) -> None:
        with self._world.pulse.during("waiting"):
            seen = (self._facts, state, self._batches, self._samples, self._digests())
            number = digest(seen)
            everyone = self._world.everyone
            numbers = agree_on_call(
                everyone, "comparing what ranks draw", checks=True, number=number
            )
        if any(other != number for other in numbers):
            self._look_closer(state)
        self._facts, self._drawn = {}, []

    def _digests(self) -> list[int]:
        return [
            digest_of(leaves, without=self._without, rough=self._rough)
            for drawn in self._drawn
            for _, leaves in drawn
        ]

    def _look_closer(self, state: str) -> None:
        """Raise, on all ranks, unless they differ in nothing that counts."""
        own = _RankReport(self._facts, state, self._drawn, self._batches, self._samples)
        reports: list[_RankReport] = collectives.all_gather_object(own)
        for name in own.facts | reports[0].facts:
            values = [rank.facts.get(name) for rank in reports]
            if any(value != values[0] for value in values):
                raise DataError(self._facts_differ(name, values))
        if any((rank.state, rank.batches) != (state, own.batches) for rank in reports):
            raise DataError(self._ends_differ(reports))
        if any(rank.samples != own.samples for rank in reports):
            counts = by_rank([rank.samples for rank in reports])
            raise DataError(self._differ(f"the number of samples so far is {counts}"))
        found = self._differences(reports)
        if not found:
            self._rough = True  # in last digits alone: from now on these are left out
            return
        readings: list[Reread] = collectives.all_gather_object(self._source.reread(self._epoch))
        varying = frozenset().union(*(reading.varying for reading in readings))
        telling = {INDICES}.union(*(reading.telling for reading in readings))
        left = [difference for difference in found if not is_among(difference.path, varying)]
        if left:
            raise DataError(self._differ(self._seen(left[0], reports)))
        without = self._without | varying
        kept = {leaf.path for _, leaves in self._drawn[0] for leaf in but(leaves, without)}
        if not self._source.order_is_ours and not kept & telling:
            raise DataError(self._nothing_to_compare(found[0], reports))
        self._without, self._rough = without, True

    def _differences(self, reports: list[_RankReport]) -> list[_Difference]:
        found = []
        for rank in reports[1:]:
            pairs = zip(reports[0].drawn, rank.drawn, strict=True)
            for batch, (first, other) in enumerate(pairs):
                for place, ((name, one), (_, two)) in enumerate(zip(first, other, strict=False)):
                    one, two = but(one, self._without), but(two, self._without)
                    found += [
                        _Difference(batch, place, name, leaf.path)
                        for leaf, _ in differing(one, two)
                    ]
        return found

    # ------------------------------------------------------------------ in words

    @property
    def _where(self) -> str:
        return f"{self._name}, epoch {self._epoch}, batch at sample {self._offset}"

    def _facts_differ(self, name: str, values: Sequence[Any]) -> str:
        advice = _ADVICE.get(name, "Make the loader with the same arguments on every rank.")
        if name in ("samples_per_epoch", "dataset"):
            advice = self._source.same_on_ranks
        return (
            f"{self._where}: ranks do not read the same data: {_NAMES.get(name, name)} is "
            f"{by_rank(values)}. {advice} {_WAY_OUT}"
        )

    def _ends_differ(self, reports: list[_RankReport]) -> str:
        states = [
            f"over after {rank.batches} batches" if rank.state == END else "not over yet"
            for rank in reports
        ]
        return self._differ(f"the epoch is {by_rank(states)}")

    def _differ(self, seen: str) -> str:
        return (
            f"{self._where}: ranks do not read the same data: {seen}. "
            f"{self._source.same_on_ranks} {_WAY_OUT}"
        )

    def _nothing_to_compare(self, found: _Difference, reports: list[_RankReport]) -> str:
        return (
            f"{self._where}: ranks do not read the same data: {self._seen(found, reports)}; and on "
            "one rank, too, samples change from reading to reading: the dataset draws from a "
            "random generator of its own, so that nobody can say which samples it gives, and no "
            "resume could find its place. Seed that generator by the epoch (set_epoch), alike on "
            "every rank, or draw from those of torch, random or numpy.random, which are seeded "
            f"for it. {_WAY_OUT}"
        )

    def _seen(self, found: _Difference, reports: list[_RankReport]) -> str:
        seen = []
        for rank in reports:
            leaves = rank.drawn[found.batch][found.place][1]
            leaf = next((leaf for leaf in leaves if leaf.path == found.path), None)
            seen.append(_shown(leaf))
        return f"{found.name}{found.path} is {by_rank(seen)}"


class _Difference(NamedTuple):
    batch: int
    place: int
    name: str
    path: str


def by_rank(values: Sequence[Any]) -> str:
    """``'8 on ranks 0, 2; 9 on rank 1'``; long lists of ranks are cut."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    parts = []
    for value, members in list(ranks.items())[:4]:
        shown = ", ".join(map(str, members[:8])) + (", …" if len(members) > 8 else "")
        parts.append(f"{value} on rank{'s' if len(members) > 1 else ''} {shown}")
    return "; ".join(parts) + ("; …" if len(ranks) > 4 else "")


def _shown(leaf: Leaf | None) -> str:
    if leaf is None:
        return "missing"
    if not leaf.values:
        return leaf.kind
    if len(leaf.values) == 1:
        return str(leaf.values[0])[:60]
    first = ", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in leaf.values[:3])
    return f"{leaf.kind}: {first[:60]}, …"


_NAMES = {
    "samples_per_epoch": "the number of samples",
    "dataset": "the dataset",
    "layout": "the layout that shares are cut for",
}
_PLACE = (
    "Load the same state_dict, or seek the same position, on every rank, and leave a loop over it "
    "at the same batch."
)
_ADVICE = {"position": _PLACE, "epoch": _PLACE, "offset": _PLACE}
_WAY_OUT = "compare=False switches this comparison off."
