"""Who watches the ranks of a launch for hangs, as the launcher sees it.

The agent calls an :class:`Overseer`; ``paceline.diagnose`` has one. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True)
class Started:
    """The ranks of a world that have just been started.

    ``ranks`` maps the global ranks of this node to their process ids; it is empty on a node whose
    ranks all stand by. ``address`` and ``port`` are those of the round store. ``round`` counts the
    worlds of this launch, from 0. ``scratch`` is a folder for files of this world
    alone, gone when the launch is.
    """

    ranks: dict[int, int]
    world_size: int
    node: int
    nodes: list[str]
    address: str
    port: int
    round: int
    scratch: Path


@dataclass(frozen=True)
class Stuck:
    """The ranks stand still for so long that something must be done about it.

    ``ranks`` are those to blame, ``step`` the last one done (``None`` where nobody knows).
    """

    action: Literal["restart", "stop"]
    summary: str
    ranks: list[int] = field(default_factory=list)
    step: int | None = None


class Overseer(Protocol):
    """Watches the ranks of this node. All calls come from one thread and must return at once."""

    def started(self, world: Started) -> None:
        """The ranks have been started."""

    def look(self) -> Stuck | None:
        """Called several times a second while they run: whether they are stuck."""

    def ended(self) -> None:
        """The ranks are gone."""
