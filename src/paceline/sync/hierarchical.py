"""A sum in two levels: within each node, across nodes, and back within.

In one ring over all ranks of *n* nodes with *p* ranks each, a node sends 2(np-1)/np of a gradient
to the next one; in two levels 2(n-1)/n of it, for two nodes with eight ranks little more than
half. The values are cut into as many chunks as the smallest node has ranks; the i-th rank of every
node adds up the i-th chunk of its node, a *lane* of these ranks adds up those over the nodes, and
each hands the result to the other ranks of its node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from paceline.network.links import PIECE_BYTES
from paceline.network.topology import Topology
from paceline.sync.wire import Wire, ring_bytes
from paceline.world import World, collectives

GroupMaker = Callable[[tuple[int, ...]], dist.ProcessGroup | None]
"""From ranks to their process group. Every rank calls it, members or not."""


def find_nodes(world: World) -> list[int]:
    """The node of each rank. A collective."""
    if world.nodes == 1:
        return [0] * world.size
    return collectives.all_gather_object(world.node)


@dataclass(frozen=True)
class Levels:
    """The process groups of this rank: those of its node, and those of its lane, if it has one."""

    topology: Topology
    node: tuple[int, ...]
    within: dist.ProcessGroup | None
    lane: tuple[int, ...]
    across: dist.ProcessGroup | None

    @classmethod
    def make(cls, rank: int, topologies: Sequence[Topology], group: GroupMaker) -> Levels:
        """Have ``group`` form the groups of all ``topologies``, and keep those of ``rank``'s.

        Every rank calls it with the same ones: that is how torch forms groups.
        """
        made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for topology in topologies:
            lanes = [topology.lane(number) for number in range(topology.lanes)]
            for ranks in (*topology.nodes, *lanes):
                if len(ranks) > 1:
                    made[ranks] = group(ranks)
        own = next(topology for topology in topologies if rank in topology.ranks)
        node = own.node_of(rank)
        place = node.index(rank)
        lane = own.lane(place) if place < own.lanes else ()
        return cls(own, node, made.get(node), lane, made.get(lane))


class Hierarchical(Wire):
    """Sums in two levels; everything else goes as on any wire.

    All ranks get bitwise-identical results, and the same one every time: whoever adds up a chunk
    does so in the order of the ranks. ``crossed`` counts the bytes of sums that this rank sent to
    other nodes.
    """

    def __init__(self, group: dist.ProcessGroup | None, levels: Levels) -> None:
        super().__init__(group)
        self.levels = levels
        self.crossed = 0.0

    def sum(self, values: Tensor) -> Tensor:
        """``values`` of all ranks added up, in place.

        Piece by piece, and all pieces of a phase are under way before the first is waited for, so
        that one piece travels within the node while another crosses.
        """
        if not values.is_contiguous():
            return values.copy_(self.sum(values.contiguous()))
        pieces = [_Piece(part, self) for part in _cut(values.view(-1))]
        gathered = [piece.gather_up() for piece in pieces]
        added = [piece.add_up(work) for piece, work in zip(pieces, gathered, strict=True)]
        back = [piece.give_back(work) for piece, work in zip(pieces, added, strict=True)]
        for work in back:
            _finish(work)
        return values


class _Piece:
    """Some values on their way through the three phases."""

    def __init__(self, values: Tensor, wire: Hierarchical) -> None:
        levels = wire.levels
        self._values, self._wire, self._levels = values, wire, levels
        self._ranks = len(levels.node)
        sizes = [chunk.numel() for chunk in values.tensor_split(levels.topology.lanes)]
        place = levels.node.index(dist.get_rank())
        # How much goes to, and comes from, each rank of the node: a chunk to each lane, ...
        self._to_lanes = sizes + [0] * (self._ranks - len(sizes))
        start = sum(sizes[:place])
        self._chunk = values[start : start + sizes[place]] if levels.lane else values[:0]
        # ... and one of this rank's own chunk from every rank.
        self._of_chunk = [self._chunk.numel()] * self._ranks
        self._received = values[:0]

    def gather_up(self) -> dist.Work | None:
        """Give each lane's rank its chunk."""
        if self._levels.within is None:
            return None
        self._received = self._values.new_empty(sum(self._of_chunk))
        self._count(self._values.numel() - self._chunk.numel())
        return _swap(
            self._received, self._values, self._of_chunk, self._to_lanes, self._levels.within
        )

    def add_up(self, arrived: dist.Work | None) -> dist.Work | None:
        """Add up the node's chunks, then those of all nodes."""
        _finish(arrived)
        if not self._chunk.numel():
            return None
        if self._received.numel():
            first, *others = self._received.view(self._ranks, -1)
            self._chunk.copy_(first)
            for other in others:
                self._chunk.add_(other)
        if self._levels.across is None:  # the only node: the sum is complete
            return None
        crossing = ring_bytes(self._chunk, len(self._levels.lane))
        self._wire.sent += crossing
        self._wire.crossed += crossing
        return dist.all_reduce(self._chunk, group=self._levels.across, async_op=True)

    def give_back(self, summed: dist.Work | None) -> dist.Work | None:
        """Give each rank of the node this rank's chunk."""
        _finish(summed)
        if self._levels.within is None:
            return None
        self._received = self._chunk.repeat(self._ranks)  # kept until the exchange is over
        self._count((self._ranks - 1) * self._chunk.numel())
        return _swap(
            self._values, self._received, self._to_lanes, self._of_chunk, self._levels.within
        )

    def _count(self, elements: int) -> None:
        self._wire.sent += elements * self._values.element_size()


def _cut(flat: Tensor) -> Iterator[Tensor]:
    if flat.numel():
        yield from flat.split(PIECE_BYTES // flat.element_size())


def _swap(
    received: Tensor,
    given: Tensor,
    received_sizes: list[int],
    given_sizes: list[int],
    group: dist.ProcessGroup,
) -> dist.Work | None:
    return dist.all_to_all_single(
        received, given, received_sizes, given_sizes, group=group, async_op=True
    )


def _finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
