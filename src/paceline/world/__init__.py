"""The processes of one run: who they are, how they talk, and their random streams."""

from paceline.world import collectives
from paceline.world.group import Group
from paceline.world.seeding import rng_state, seed_everything, set_rng_state
from paceline.world.world import DEFAULT_TIMEOUT, World

__all__ = [
    "DEFAULT_TIMEOUT",
    "Group",
    "World",
    "collectives",
    "rng_state",
    "seed_everything",
    "set_rng_state",
]
