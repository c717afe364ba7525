"""Which ranks of a group share a node. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """The ranks of a group by node: ``((0, 1), (2, 3))``. Both are in ascending order."""

    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, ranks: Sequence[int], node_of: Sequence[int]) -> Topology:
        """That of ``ranks``, where ``node_of[rank]`` is the node of each rank of the world."""
        members: dict[int, list[int]] = {}
        for rank in sorted(ranks):
            members.setdefault(node_of[rank], []).append(rank)
        return cls(tuple(tuple(own) for own in members.values()))

    @property
    def ranks(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(sorted(rank for node in self.nodes for rank in node))

    @property
    def size(self) -> int:
        """How many there are."""
        return sum(map(len, self.nodes))

    @property
    def has_two_levels(self) -> bool:
        """Whether there is a step within a node to take before one across nodes."""
        return len(self.nodes) > 1 and self.size > len(self.nodes)

    @property
    def lanes(self) -> int:
        """How many ranks of every node talk to other nodes: as many as the smallest node has."""
        return min(map(len, self.nodes))

    def node_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that share a node with ``rank``."""
        return next(node for node in self.nodes if rank in node)

    def lane(self, number: int) -> tuple[int, ...]:
        """The ranks, one on each node, that exchange the ``number``-th chunk."""
        return tuple(sorted(node[number] for node in self.nodes))

    def ways_out(self) -> list[int]:
        """For each node: how often the ring of all ranks in their order leaves it."""
        home = {rank: number for number, node in enumerate(self.nodes) for rank in node}
        ranks = self.ranks
        out = [0] * len(self.nodes)
        for rank, following in zip(ranks, (*ranks[1:], ranks[0]), strict=True):
            if home[rank] != home[following]:
                out[home[rank]] += 1
        return out

    def __str__(self) -> str:
        sizes = [len(node) for node in self.nodes]
        if len(set(sizes)) == 1:
            return f"{len(sizes)} nodes with {sizes[0]} ranks each"
        return f"nodes with {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} ranks"
