"""Random numbers of ranks that compute together: dropout under tensor parallelism."""

from __future__ import annotations

from paceline.layout import Layout
from paceline.world import World, collectives, rng_state, set_rng_state


def share_random_stream(layout: Layout, world: World) -> None:
    """Give tensor-parallel ranks one random stream: what they hold in common must stay equal."""
    streams = collectives.all_gather_object(rng_state())
    own = layout.coordinate(world.rank)
    first = next(r for r in range(world.size) if layout.coordinate(r) == own._replace(tp=0))
    set_rng_state(streams[first])
