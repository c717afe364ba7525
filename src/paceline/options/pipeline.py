"""How a pipeline is to be cut and run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from paceline.errors import LayoutError, TrainingError
from paceline.layout.pipeline_schedules import (
    check_schedule,
    default_stages_per_rank,
    minimum_microbatches,
    placement,
)
from paceline.options.arguments import documented
from paceline.options.declare import Option, check

Balance = Literal["parameters", "flops", "time"]


@documented
@dataclass(frozen=True)
class Pipelining:
    """How ``pp`` cuts a model into stages and in which order they work."""

    config_section: ClassVar[str] = "pipeline"

    schedule: Annotated[
        str,
        Option(
            "In which order stages run microbatches: gpipe, 1f1b, interleaved-1f1b, "
            "interleaved-zero-bubble, zbv or dualpipev."
        ),
    ] = "1f1b"
    cuts: Annotated[
        Sequence[str] | None,
        Option(
            "Names of the modules that start a new stage, such as 'blocks.2' ('block@3': the third "
            "call of a module that is called several times). None: cut by balance.",
            must="names of modules, like ['blocks.2', 'blocks.4']",
        ),
    ] = None
    balance: Annotated[
        Balance,
        Option(
            "What an automatic cut evens out between stages: parameters, flops, or measured time."
        ),
    ] = "parameters"
    stages_per_rank: Annotated[
        int | None,
        Option("Stages on each rank. None: what the schedule is made for.", ge=1),
    ] = None
    microbatches: Annotated[
        int | None,
        Option(
            "How many microbatches a step runs. None: as many as microbatch makes, and no "
            "fewer than the schedule needs.",
            ge=1,
        ),
    ] = None

    def __post_init__(self) -> None:
        default_stages_per_rank(self.schedule)  # refuses a name that is none
        if isinstance(self.cuts, str) and self.cuts:
            object.__setattr__(self, "cuts", (self.cuts,))
        check(self, "pipeline: ")
        if self.cuts is not None:
            if not all(self.cuts):
                raise TrainingError(
                    f"pipeline: cuts={self.cuts!r} must be names of modules, like "
                    "['blocks.2', 'blocks.4']."
                )
            object.__setattr__(self, "cuts", tuple(self.cuts))

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
