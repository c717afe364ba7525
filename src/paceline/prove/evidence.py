"""What is known about a layout that differs, as the rules that name the cause look at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.prove.cases import Case
from paceline.prove.comparison import KINDS, Measure, Tolerance, ValueKey
from paceline.prove.jobs import RankOutcome, Reference
from paceline.prove.sample_weights import Weights

NEAR = 1e-3
"""Factors and weights that differ by this share or less are taken for the same."""


@dataclass(frozen=True)
class LikelyCause:
    """``name`` is that of the plant which is this bug, where there is one."""

    name: str
    words: str


@dataclass(frozen=True)
class DifferenceEvidence:
    """Everything known about a layout that differs."""

    case: Case
    samples: int
    clip_norm: float | None
    sync_batchnorm: bool
    reference: Reference
    outcomes: Sequence[RankOutcome]
    place: ValueKey
    rank: int
    measure: Measure
    """Of the first tensor that differs."""
    wrong: frozenset[tuple[str, str]]
    """Kind and name of every value that differs in that step, on any rank."""
    weights: Weights | None = None
    right_without_accumulation: bool | None = None
    bias_on_every_rank: bool = False
    """Whether row-parallel biases that count once a rank explain the loss."""

    def differs(self, kind: str) -> bool:
        """Whether a value of this kind differs."""
        return any(other == kind for other, _ in self.wrong)

    def wrong_names(self, kind: str) -> set[str]:
        """The tensors of this kind that differ."""
        return {name for other, name in self.wrong if other == kind}

    @property
    def samples_differ(self) -> bool:
        """Whether the layout says that it saw another number of samples."""
        return self.outcomes[self.rank].samples != self.reference.batch

    @property
    def data_rank(self) -> int:
        """Which share of the data the rank reads that differs first."""
        return self.case.data_rank(self.rank)

    @property
    def who(self) -> str:
        """The rank that differs, where there are several."""
        return f" on rank {self.rank}" if len(self.outcomes) > 1 else ""

    @property
    def reader(self) -> str:
        """What to call a rank that stands for a share of the data."""
        return "rank" if not self.case.layout.beyond_dp else "data-parallel rank"

    def ranks_differ(self, *, same_data: bool = False, same_copy: bool = False) -> bool:
        """Whether ranks have different gradients.

        ``same_data``: even those that share samples; ``same_copy``: even those whose shards make
        one copy of the model.
        """
        groups: dict[int, list[Tensor | None]] = {}
        for rank, outcome in enumerate(self.outcomes):
            reader = self.case.data_rank(rank)
            copy = reader // self.case.layout.shards
            key = reader if same_data else copy if same_copy else 0
            groups.setdefault(key, []).append(outcome.sketches.get(self.place.step))
        return any(_unequal(sketches) for sketches in groups.values())

    def norms(self) -> list[float]:
        """By rank: its norm over the right one, in the step that differs; empty without norms."""
        place = ValueKey(self.place.step, "norm", "")
        found = [o.measures[place].factor for o in self.outcomes if place in o.measures]
        return found if len(found) == len(self.outcomes) else []


def _unequal(sketches: Sequence[Tensor | None]) -> bool:
    if all(one is None for one in sketches):
        return False
    first = sketches[0]
    for other in sketches[1:]:
        if first is None or other is None or first.shape != other.shape:
            return True
        if float((first - other).norm()) > 1e-6 * float(first.norm()):
            return True
    return False


def near(value: float, target: float) -> bool:
    """Whether a factor is ``target``."""
    return abs(value - target) <= NEAR * max(1.0, abs(target))


def uniform(values: Sequence[float]) -> float | None:
    """The common value of ``values``; ``None`` where they differ or it is zero."""
    mean = sum(values) / len(values)
    if near(mean, 0) or not all(near(value / mean, 1) for value in values):
        return None
    return mean


def first_to_differ(
    outcomes: Sequence[RankOutcome], tolerance: Tolerance, order: Sequence[str]
) -> tuple[ValueKey, int, Measure] | None:
    """The first value that differs, and its rank: by step, by kind, then as the modules ran.

    Loss and norm are numbers made of all tensors: they come first only where no tensor differs.
    """
    ran = {name: index for index, name in enumerate(order)}

    def when(found: tuple[ValueKey, int, Measure]) -> tuple[int, bool, int, int, int]:
        place, rank, _ = found
        module = ran.get(place.name.rpartition(".")[0], len(ran))
        return place.step, place.name == "", KINDS.index(place.kind), module, rank

    offenders = [
        (place, rank, one)
        for rank, outcome in enumerate(outcomes)
        for place, one in outcome.measures.items()
        if one.difference > tolerance.allowed(place)
    ]
    return min(offenders, key=when, default=None)


def wrong_in(
    outcomes: Sequence[RankOutcome], tolerance: Tolerance, step: int
) -> frozenset[tuple[str, str]]:
    """Kind and name of what differs in ``step`` on any rank."""
    return frozenset(
        (place.kind, place.name)
        for outcome in outcomes
        for place, one in outcome.measures.items()
        if place.step == step and one.difference > tolerance.allowed(place)
    )


def missing_everywhere(outcomes: Sequence[RankOutcome]) -> list[str]:
    """Parameters of the reference that no rank has."""
    absent = set(outcomes[0].missing).intersection(*(outcome.missing for outcome in outcomes))
    return sorted(absent)
