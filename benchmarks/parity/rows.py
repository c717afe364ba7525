"""The layouts of the parity matrix: everything alone, and compositions that cover all pairs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from paceline.layout.pipeline_schedules import SCHEDULES, default_stages_per_rank

GLOBAL_BATCH = 13  # divides by nothing: shares, microbatches and pipelines are all uneven
MOST_RANKS = 8
AT_LEAST = 44


class Row(NamedTuple):
    """One layout, by its axes."""

    dp: int = 1
    zero: int = 0
    replicas: int = 1
    tp: int = 1
    sequence: int = 0
    pp: int = 1
    schedule: str = ""

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def stages(self) -> int:
        """Over all ranks."""
        return self.pp * default_stages_per_rank(self.schedule) if self.pp > 1 else 1

    @property
    def blocks(self) -> int:
        """How many blocks a model needs to be cut into the stages."""
        return max(2, self.stages)

    @property
    def axes(self) -> int:
        """How many of dp, tp and pp are used."""
        return (self.dp > 1) + (self.tp > 1) + (self.pp > 1)

    def __str__(self) -> str:
        """As the report names it, without the microbatch."""
        told = [f"dp={self.dp}"] if self.dp > 1 or self.axes == 0 else []
        told += [f"zero={self.zero}"] if self.zero else []
        told += [f"replicas={self.replicas}"] if self.replicas > 1 else []
        told += [f"tp={self.tp}"] if self.tp > 1 else []
        told += [f"pp={self.pp}"] if self.pp > 1 else []
        told += [f"schedule={self.schedule}"] if self.schedule else []
        told += ["sequence=1"] if self.sequence else []
        return ",".join(told)

    @property
    def case(self) -> str:
        """For the prover: with a microbatch that makes every rank accumulate."""
        share = -(-GLOBAL_BATCH // self.dp)
        return f"{self},microbatch={max(1, -(-share // 2))}"


def alone() -> list[Row]:
    """Every stage, axis and schedule by itself."""
    rows = [Row(), Row(dp=2), Row(dp=4)]
    rows += [Row(dp=2, zero=zero) for zero in (1, 2, 3)]
    rows += [Row(dp=4, zero=zero, replicas=2) for zero in (1, 2, 3)]
    rows += [Row(tp=2), Row(tp=4), Row(tp=2, sequence=1), Row(tp=4, sequence=1)]
    rows += [Row(pp=pp, schedule=name) for pp in (2, 4) for name in SCHEDULES]
    return rows


def _compositions() -> Iterator[Row]:
    """Every product of two axes or more on up to eight ranks."""
    for dp, zero, replicas, tp, sequence, pp, schedule in itertools.product(
        (1, 2, 4), (0, 1, 2, 3), (1, 2), (1, 2, 4), (0, 1), (1, 2, 4), ("", *SCHEDULES)
    ):
        row = Row(dp, zero, replicas, tp, sequence, pp, schedule)
        sound = (
            row.axes > 1
            and row.world <= MOST_RANKS
            and (zero == 0 or dp > 1)
            and (replicas == 1 or (zero > 0 and dp == 4))
            and (sequence == 0 or tp > 1)
            and bool(schedule) == (pp > 1)
        )
        if sound:
            yield row


def compositions() -> list[Row]:
    """A set in which every two values of two axes that go together meet, then three, up to 44."""
    left = sorted(_compositions(), key=lambda row: (row.world, row))
    chosen: list[Row] = []
    for size in (2, 3):
        wanted = {part for row in left for part in itertools.combinations(enumerate(row), size)}
        wanted -= {part for row in chosen for part in itertools.combinations(enumerate(row), size)}
        while wanted and (size == 2 or len(chosen) < AT_LEAST):
            best = max(left, key=lambda row: (_new(row, size, wanted) / row.world, -row.world))
            chosen.append(best)
            left.remove(best)
            wanted -= set(itertools.combinations(enumerate(best), size))
    return chosen


def _new(row: Row, size: int, wanted: set[tuple[tuple[int, object], ...]]) -> int:
    return sum(part in wanted for part in itertools.combinations(enumerate(row), size))


def all_rows() -> list[Row]:
    return alone() + compositions()
