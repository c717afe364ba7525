"""Who shares the memory of a node, and who keeps copies for whom.

A node, here, is the ranks that see the same shared memory: a copy in the memory that holds the
original would be lost with it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from paceline.checkpoint.sharded import agreement
from paceline.checkpoint.storage.os_errors import explained
from paceline.errors import CheckpointError

_BOOT = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True)
class MemoryNodes:
    """The ranks on each node, and which of them this is."""

    ranks: list[list[int]]
    rank: int
    group: dist.ProcessGroup | None

    @property
    def here(self) -> int:
        """The number of this node."""
        return next(number for number, ranks in enumerate(self.ranks) if self.rank in ranks)

    @property
    def is_first_here(self) -> bool:
        """Whether this rank sees to what has to be done once on a node."""
        return self.ranks[self.here][0] == self.rank

    def is_mine(self, node: int, job: int) -> bool:
        """Whether this is the rank on ``node`` that does the job of this number."""
        ranks = self.ranks[node]
        return ranks[job % len(ranks)] == self.rank


def find_nodes(
    root: str | os.PathLike[str], group: dist.ProcessGroup | None, problem: str | None = None
) -> MemoryNodes:
    """Find out who shares the memory at ``root``. A collective.

    Raises ``CheckpointError`` on every rank where one has a ``problem`` or no such memory.
    """
    memory = ""
    try:
        memory = _memory_id(Path(root))
    except CheckpointError as error:
        problem = problem or str(error)
    met = agreement.all_gather((memory, problem), group)
    if (found := agreement.joined_problems([theirs for _, theirs in met])) is not None:
        raise CheckpointError(found)
    return MemoryNodes(_together([memory for memory, _ in met]), agreement.group_rank(group), group)


def partners(nodes: Sequence[Sequence[int]]) -> list[int | None]:
    """For every rank, the one that keeps its copy: in the same place on the next node.

    ``nodes`` is the ranks on each. ``None`` for all where there is one node only. A node with
    fewer ranks than the one before keeps several copies each.
    """
    chosen: list[int | None] = [None] * sum(map(len, nodes))
    if len(nodes) == 1:
        return chosen
    for number, ranks in enumerate(nodes):
        following = nodes[(number + 1) % len(nodes)]
        for place, rank in enumerate(ranks):
            chosen[rank] = following[place % len(following)]
    return chosen


def _together(memories: Sequence[str]) -> list[list[int]]:
    by_memory: dict[str, list[int]] = {}
    for rank, memory in enumerate(memories):
        by_memory.setdefault(memory, []).append(rank)
    return list(by_memory.values())


def _memory_id(root: Path) -> str:
    """The same text on all ranks that see this very folder, and on no others."""
    with explained("look at", str(root)):
        found = os.stat(root)
    try:
        machine = Path(_BOOT).read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        machine = socket.gethostname()
    return f"{machine}/{found.st_dev}/{found.st_ino}"
