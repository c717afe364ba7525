"""The door to an engine's inner parts, for the rooms of Paceline that need more than a user does.

``paceline.Engine`` shows what a user may touch. Trainer, prover and benchmarks also look at
where time goes, save state rank by rank, or watch gradients:

    internals_of(engine).context.clock = make_clock(…)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.engine.context import StepContext
from paceline.engine.memory import MemoryMeter
from paceline.engine.rank_state import RankStates
from paceline.engine.state import WholeState
from paceline.sync.protocol import Sync
from paceline.sync.replica import Replica


@dataclass
class Internals:
    """What an engine is made of."""

    context: StepContext
    """What its steps work with."""
    state: WholeState
    """Saves and loads the whole model's state."""
    rank_state: RankStates
    """Saves and loads piece by piece, as each rank holds it."""
    meter: MemoryMeter
    notes: list[str] = field(default_factory=list)
    """What there is to tell the user."""

    @property
    def replica(self) -> Replica:
        """The model on its layout."""
        return self.context.replica

    @property
    def sync(self) -> Sync:
        """How replicas agree."""
        return self.context.sync


class HasInternals:
    """The part of ``paceline.Engine`` that only ``internals_of`` looks at."""

    _internals: Internals


def internals_of(owner: HasInternals) -> Internals:
    """The inner parts of an engine. Not for users: they change from version to version."""
    return owner._internals
