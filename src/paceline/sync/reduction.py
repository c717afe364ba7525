"""How gradients are summed over the ranks: chosen once, kept, and told.

The choice is made before the first step, not when the engine is made: a checkpoint that is loaded
in between brings the one its run was made with.
"""

from __future__ import annotations

import contextlib
from typing import Any

from paceline.network.buckets import DEFAULT_MIB, MIB, tune
from paceline.network.links import choose
from paceline.network.topology import Topology
from paceline.options import Compression, Reduction
from paceline.parallel.averaging import sparse_embedding
from paceline.parallel.distributed_model import data_ranks
from paceline.sync.averaging import GradientAveraging, group_for_gradients
from paceline.sync.hierarchical import Hierarchical, Levels, find_nodes
from paceline.sync.link_timing import BackwardTimer, measure, measure_link
from paceline.sync.replica import Replica
from paceline.sync.wire import Wire

_TIMED_STEPS = 3  # after the first, which is unlike the others


class ReductionChoice:
    """Chooses between one ring and two levels, and the size of buckets."""

    def __init__(self, options: Reduction, replica: Replica) -> None:
        self._replica, self._world = replica, replica.world
        self.options = options
        self.averaging: GradientAveraging | None = None
        """The way that gradients go, where it is not DDP's or FSDP's own."""
        self.bucket_mib = self.options.static_mib
        """That of now; ``None``: torch's own."""
        self.hierarchical = False
        """Whether sums go in two levels now."""
        self.notes: list[str] = []
        """What there is to tell the user."""
        self._is_chosen = False
        self._is_tuned = False
        self._kept: bool | None = None  # what auto came to, for a resume to keep to
        self._saved: dict[str, Any] | None = None
        self._topologies: list[Topology] = []
        self._levels: Levels | None = None
        self._timer: BackwardTimer | None = None
        self._steps = 0

    # ------------------------------------------------------------------ around steps

    def begin_step(self) -> None:
        """Before the first step, or the first after a resume: choose. Then it is a collective."""
        layout = self._replica.layout
        if self._is_chosen or layout.zero or layout.dp == 1:
            return
        self._is_chosen = True
        with self._world.pulse.during("waiting"):
            self._find_topologies()
            saved = self._usable()
            hierarchical = self._choose(saved)
            bucket = self.options.static_mib
            if self.options.tuned and saved is not None and saved["tuned"]:
                bucket, self._is_tuned = saved["bucket_mib"], True
            self._apply(hierarchical, bucket)
        if self.options.tuned and not self._is_tuned:
            self._timer = BackwardTimer(self._replica.parameters, self._replica.device)

    def timing(self) -> contextlib.AbstractContextManager[None]:
        """Around the backward pass that exchanges gradients."""
        if self._timer is None or not self._steps:
            return contextlib.nullcontext()
        return self._timer.timing()

    def end_step(self) -> None:
        """After each step: tune, once enough of them were timed. Then it is a collective."""
        self._steps += 1
        if self._timer is not None and self._timer.passes == _TIMED_STEPS:
            with self._world.pulse.during("waiting"):
                self._tune(self._timer)
            self._timer = None

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any] | None:
        """What was chosen, and for which ranks on which nodes; ``None``: nothing was."""
        if not self._is_chosen:
            return self._saved
        if self._kept is None and not self._is_tuned:
            return None
        return {
            "nodes": [topology.nodes for topology in self._topologies],
            "hierarchical": self._kept,
            "tuned": self._is_tuned,
            "bucket_mib": self.bucket_mib,
        }

    def take(self, saved: dict[str, Any] | None) -> None:
        """Go on as a checkpoint says, if the ranks lie on nodes as they did then."""
        self._saved = saved
        self._is_chosen = self._is_tuned = False
        self._kept, self._timer = None, None

    def _usable(self) -> dict[str, Any] | None:
        saved = self._saved
        if saved is None:
            return None
        if saved["nodes"] == [topology.nodes for topology in self._topologies]:
            return saved
        self.notes.append(
            "the ranks lie on other nodes than in the run that is resumed: how gradients are "
            "summed is chosen anew, and may differ in the last bit"
        )
        return None

    # ------------------------------------------------------------------ choosing

    def _find_topologies(self) -> None:
        nodes = find_nodes(self._world)
        groups = data_ranks(self._world, self._replica.layout)
        self._topologies = [Topology.of(ranks, nodes) for ranks in groups]

    def _choose(self, saved: dict[str, Any] | None) -> bool:
        asked, world = self.options.hierarchy, self._world
        if asked == "never" or not any(t.has_two_levels for t in self._topologies):
            return False
        if sparse_embedding(self._replica.model) is not None:  # with "always" refused before
            return False
        if self._levels is None:
            self._levels = Levels.make(
                world.rank,
                self._topologies,
                lambda ranks: group_for_gradients(world, ranks),
            )
        if asked == "always":
            return True
        if saved is not None and saved["hierarchical"] is not None:
            self._kept = saved["hierarchical"]
        else:
            self._kept = self._choose_by_time(self._levels)
        return bool(self._kept)

    def _choose_by_time(self, levels: Levels) -> bool:
        links = self.options.described
        bucket = (self.bucket_mib or DEFAULT_MIB) * MIB
        size = int(min(self._gradient_bytes(), bucket))
        if links is not None:
            choice, source = choose(self._topologies[0], links, size), "by the links described"
        else:
            flat, layered = self._wire(None), self._wire(levels)
            choice, source = measure(flat, layered, self._world, size), "as measured"
        self.notes.append(f"{choice}, {source} ({self._topologies[0]})")
        return choice.hierarchical

    def _tune(self, timer: BackwardTimer) -> None:
        world = self._world
        wire = self._wire(self._levels if self.hierarchical else None)
        link = measure_link(wire, world)
        found = tune(timer.gradients(world), link)
        self.notes.append(f"{found}; a sum over all ranks goes at {link}")
        self._is_tuned = True
        is_default = found.bucket_mib == DEFAULT_MIB
        self._apply(self.hierarchical, None if is_default else found.bucket_mib)

    def _wire(self, levels: Levels | None) -> Wire:
        """A wire to measure: what goes over it is not counted as sent."""
        group = self._replica.spread.data_group.process_group
        return Wire(group) if levels is None else Hierarchical(group, levels)

    def _gradient_bytes(self) -> int:
        trained = (p for p in self._replica.parameters if p.requires_grad)
        return sum(p.numel() * p.element_size() for p in trained)

    def _apply(self, hierarchical: bool, bucket_mib: float | None) -> None:
        """Have gradients go this way from now on."""
        replica, averaging = self._replica, self.averaging
        if hierarchical and averaging is None:
            averaging = GradientAveraging(
                Compression(), replica.model, replica.layout, replica.world
            )
            averaging.know(replica.spread.held, replica.spread.tied)
        elif not hierarchical and averaging is not None and not averaging.compresses:
            averaging.close()
            averaging = None
        if averaging is not None:
            averaging.go_by(self._levels if hierarchical else None)
        is_same = averaging is self.averaging and bucket_mib == self.bucket_mib
        self.averaging, self.hierarchical, self.bucket_mib = averaging, hierarchical, bucket_mib
        if not is_same:
            replica.spread.rewire(averaging, bucket_mib)
