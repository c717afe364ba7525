"""Ranks that make different calls in one collective, where the calls have to be the same.

Gloo answers different dtypes with garbage and no error, other differences with a hang or an abort.
Every few seconds each rank posts a digest of what it called; the digests are compared, so that a
difference is found although nothing hangs.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.diagnose.hangs.rank_heartbeat import Call, GroupKey
from paceline.launch.messages import BadMessage, decode

# In these every rank brings as much as every other, of the same kind.
_ALIKE = ("all_reduce", "allreduce", "broadcast", "reduce", "barrier", "reduce_scatter")
# In these ranks may bring different amounts, or one of them nothing.
_ROOTED = ("gather", "scatter")
_KEPT = 4096
"""How many calls of a group are remembered of each rank for comparison."""


@dataclass(frozen=True)
class Mismatch:
    """The first number at which members of a group made different calls; words by rank.

    ``gone_on`` are the ranks that have begun a later call of the group.
    """

    key: GroupKey
    number: int
    said: dict[int, str]
    gone_on: frozenset[int] = frozenset()

    @property
    def ranks(self) -> list[int]:
        """Those that differ from most; all of them when there is no most."""
        counts = Counter(self.said.values())
        (common, most), *others = counts.most_common()
        if others and others[0][1] == most:
            return sorted(self.said)
        return sorted(rank for rank, words in self.said.items() if words != common)


def words(call: Call) -> str:
    """A call in words: ``all_reduce [4, 8] float32``."""
    shapes = " ".join(str(list(shape)) for shape in call.shapes)
    dtypes = " ".join(dict.fromkeys(call.dtypes))
    return " ".join(part for part in (call.op, shapes, dtypes) if part)


def must_match(call: Call) -> str:
    """What has to be the same on every member of the group, in words."""
    op = call.op.lstrip("_")
    if op in _ROOTED:
        return op
    dtypes = ",".join(dict.fromkeys(call.dtypes))
    if op.startswith(_ALIKE):
        numbers = ",".join(str(math.prod(shape)) for shape in call.shapes)
        return f"{op} {numbers} {dtypes}"
    return f"{op} {dtypes}"


def first_mismatch(calls: Mapping[int, Iterable[Call]]) -> Mismatch | None:
    """The first call in which ranks differ, among those that are on record of several of them."""
    by_place: dict[tuple[GroupKey, int], dict[int, Call]] = {}
    for rank, own in calls.items():
        for call in own:
            by_place.setdefault((call.key, call.number), {})[rank] = call
    found = [
        Mismatch(key, number, {rank: words(call) for rank, call in sorted(same.items())})
        for (key, number), same in by_place.items()
        if len({must_match(call) for call in same.values()}) > 1
    ]
    # Past the first, everything is out of step; the fewest calls tell the earliest group.
    return min(found, key=lambda m: (m.number, m.key), default=None)


def digest(calls: Iterable[Call], after: Mapping[GroupKey, int]) -> str:
    """The calls since those numbers, as text: each distinct call once, and which came when."""
    table: dict[str, int] = {}
    groups: dict[GroupKey, list[tuple[int, int]]] = {}
    for call in calls:
        if call.number > after.get(call.key, 0):
            text = json.dumps([must_match(call), words(call)])
            groups.setdefault(call.key, []).append(
                (call.number, table.setdefault(text, len(table)))
            )
    return json.dumps(
        {
            "table": [json.loads(text) for text in table],
            "groups": [[*key, numbers] for key, numbers in groups.items()],
        }
    )


@dataclass(frozen=True)
class _Digest:
    """What ``digest`` made: distinct calls, and which of them each group's numbers are."""

    table: list[tuple[str, str]]
    groups: list[tuple[str, str, list[int], list[tuple[int, int]]]]


class CallComparison:
    """Compares digests as they come in; reports each group's first mismatch once."""

    def __init__(self) -> None:
        self._latest: dict[int, str] = {}
        self._calls: dict[GroupKey, dict[int, dict[int, tuple[str, str]]]] = {}
        self._told: set[GroupKey] = set()

    def add(self, digests: Mapping[int, str]) -> Mismatch | None:
        """Take in the latest digest of each rank; the first mismatch that shows, if any."""
        changed: set[GroupKey] = set()
        for rank, text in digests.items():
            if self._latest.get(rank) != text:
                self._latest[rank] = text
                changed |= self._take(rank, text)
        for key in sorted(changed - self._told):
            found = self._compare(key)
            if found is not None:
                self._told.add(key)
                return found
        return None

    def _take(self, rank: int, text: str) -> set[GroupKey]:
        try:
            data = decode(_Digest, text)
        except BadMessage:
            return set()  # not a rank's
        table = dict(enumerate(data.table))
        changed = set()
        for backend, group, ranks, numbers in data.groups:
            key: GroupKey = (backend, group, tuple(ranks))
            by_number = self._calls.setdefault(key, {})
            for number, index in numbers:
                if index in table:
                    by_number.setdefault(number, {})[rank] = table[index]
            for old in sorted(by_number)[:-_KEPT]:
                del by_number[old]
            changed.add(key)
        return changed

    def _compare(self, key: GroupKey) -> Mismatch | None:
        calls = self._calls[key]
        for number, by_rank in sorted(calls.items()):
            if len({must for must, _ in by_rank.values()}) > 1:
                said = {rank: words for rank, (_, words) in sorted(by_rank.items())}
                later = (rank for n, ranks in calls.items() if n > number for rank in ranks)
                return Mismatch(key, number, said, frozenset(later))
        return None
