"""The interface between the launcher and what watches its ranks for hangs.

The agent calls a ``HangWatcher``; ``paceline.diagnose`` implements one. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True)
class StartedRanks:
    """The ranks of a world that have just been started.

    ``ranks`` maps the global ranks of this node to their process ids; it is empty on a node whose
    ranks are all idle. ``address`` and ``port`` are those of the round store. ``round`` counts the
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
class DetectedHang:
    """The ranks have made no progress for so long that something must be done about it.

    ``ranks`` are those to blame, ``step`` the last one done (``None`` if not known).
    """

    action: Literal["restart", "stop"]
    summary: str
    ranks: list[int] = field(default_factory=list)
    step: int | None = None


class HangWatcher(Protocol):
    """Watches the ranks of this node. All calls come from one thread and must return at once."""

    def started(self, world: StartedRanks) -> None:
        """The ranks have been started."""

    def look(self) -> DetectedHang | None:
        """Called several times a second while they run: whether they are stuck."""

    def ended(self) -> None:
        """The ranks are gone."""
