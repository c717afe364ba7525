"""How a pipeline is to be cut and run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from paceline.errors import LayoutError, TrainingError
from paceline.layout.schedules import (
    check_schedule,
    default_stages_per_rank,
    minimum_microbatches,
    placement,
)

Balance = Literal["parameters", "flops", "time"]


@dataclass(frozen=True)
class Pipelining:
    """How ``pp`` cuts a model into stages and in which order they work.

    ``schedule`` is one of ``gpipe``, ``1f1b``, ``interleaved-1f1b``, ``interleaved-zero-bubble``,
    ``zbv`` and ``dualpipev``. ``cuts`` are the names of the modules that start a new stage
    (``"blocks.2"``; ``"block@3"`` for the third call of a module that is called several times);
    left out, the model is cut so that the heaviest stage is as light as can be, by ``balance``:
    the stages' ``parameters``, ``flops``, or measured ``time``. ``stages_per_rank`` is for the
    interleaved schedules, 2 unless said otherwise. ``microbatches`` is how many a step runs; left
    out, as many as the engine's ``microbatch`` makes, or the schedule needs.
    """

    schedule: str = "1f1b"
    cuts: Sequence[str] | None = None
    balance: Balance = "parameters"
    stages_per_rank: int | None = None
    microbatches: int | None = None

    def __post_init__(self) -> None:
        default_stages_per_rank(self.schedule)  # refuses a name that is none
        if self.cuts is not None:
            names = (self.cuts,) if isinstance(self.cuts, str) else tuple(self.cuts)
            if not all(isinstance(name, str) and name for name in names):
                raise TrainingError(
                    f"pipeline: cuts={self.cuts!r} must be names of modules, like "
                    "['blocks.2', 'blocks.4']."
                )
            object.__setattr__(self, "cuts", names)
        if self.balance not in get_args(Balance):
            raise TrainingError(
                f"pipeline: balance={self.balance!r} must be one of {', '.join(get_args(Balance))}."
            )
        for name in ("stages_per_rank", "microbatches"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (whole and value > 0):
                raise TrainingError(f"pipeline: {name}={value!r} must be a whole number from 1 up.")

    def placement(self, pp: int) -> list[list[int]]:
        """Which stages each of ``pp`` ranks holds."""
        return placement(self.schedule, pp, self.stages_per_rank)

    def stages(self, pp: int) -> int:
        """How many stages ``pp`` ranks hold together."""
        return sum(len(held) for held in self.placement(pp))

    def microbatches_for(self, pp: int, at_least: int = 1) -> int:
        """The fewest microbatches, from ``at_least`` up, that the schedule can run.

        With ``microbatches`` given, that many; too few for ``at_least`` is an error.
        """
        if self.microbatches is not None:
            check_schedule(self.schedule, pp, self.microbatches, self.stages_per_rank)
            if self.microbatches < at_least:
                raise TrainingError(
                    f"pipeline: microbatches={self.microbatches}, but this step has {at_least}. "
                    "Raise microbatches, or leave it or the engine's microbatch out."
                )
            return self.microbatches
        least = minimum_microbatches(self.schedule, pp, self.stages_per_rank)
        for number in range(max(at_least, least), max(at_least, least) + pp + 1):
            try:
                check_schedule(self.schedule, pp, number, self.stages_per_rank)
            except LayoutError:
                continue
            return number
        raise AssertionError(f"{self.schedule}: no number of microbatches fits pp={pp}")
