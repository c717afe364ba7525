"""Random numbers of forward passes: which samples they are for, and what a checkpoint keeps.

How they are drawn is in ``paceline.randomness``. What is not drawn by sample comes from each rank's
own stream, which tensor-parallel ranks share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.data.batch_layout import start_of
from paceline.engine.batch import batch_size
from paceline.errors import DataError
from paceline.layout import Layout
from paceline.options import EngineOptions
from paceline.randomness import ForwardRandomness
from paceline.sync.replica import Replica
from paceline.world import World, collectives, rng_state, set_rng_state

_ASKED = 3
"""Steps after which ranks no longer count for a model that has drawn nothing."""


def share_random_stream(layout: Layout, world: World) -> None:
    """Give tensor-parallel ranks one random stream: what they hold in common must stay equal."""
    streams = collectives.all_gather_object(rng_state())
    own = layout.coordinate(world.rank)
    first = next(r for r in range(world.size) if layout.coordinate(r) == own._replace(tp=0))
    set_rng_state(streams[first])


def make_randomness(options: EngineOptions, world: World) -> ForwardRandomness:
    """What an engine's forward passes draw from: by the seed that rank 0's streams began with."""
    seed = torch.initial_seed()
    if options.randomness != "fast" and world.size > 1:
        seed = collectives.broadcast_object(seed)
    return ForwardRandomness(
        seed, strict=options.randomness == "strict", off=options.randomness == "fast"
    )


class SampleNumbers:
    """Finds the place of this rank's samples in the global batch of a step.

    A loader of Paceline knows it. Where the first batch of some rank comes from elsewhere, all
    ranks count together in each step, unless ``alone``: replicas that train alone do not wait for
    each other.
    """

    def __init__(self, replica: Replica, *, alone: bool) -> None:
        self._replica = replica
        self._counts_together = not alone
        self._steps = 0

    def of(self, batch: Any, *, asks: bool) -> Tensor | None:
        """The number of each sample in the global batch; None where the batch does not tell."""
        try:
            samples = batch_size(batch)
        except DataError:  # on all ranks alike: it goes by the structure
            return None
        start = self._start(batch, samples, asks=asks)
        return torch.arange(start, start + samples)

    def _start(self, batch: Any, samples: int, *, asks: bool) -> int:
        layout, own = self._replica.layout, self._replica.coordinate.dp
        if layout.dp == 1:
            return 0
        start = start_of(batch)
        if self._counts_together and asks:
            before = self._count(samples, start is not None)
            start = before if start is None else start
        return own * samples if start is None else start

    def _count(self, samples: int, known: bool) -> int:
        """How many samples the ranks before this one have. A collective, so all must come here."""
        layout, own = self._replica.layout, self._replica.coordinate.dp
        randomness = self._replica.randomness
        assert randomness is not None
        everyone = collectives.all_gather_object((samples, known, randomness.drew))
        self._steps += 1
        all_known = all(known for _, known, _ in everyone)
        nobody_draws = self._steps >= _ASKED and not any(drew for _, _, drew in everyone)
        self._counts_together = not all_known and not nobody_draws
        counts = {layout.coordinate(rank).dp: n for rank, (n, _, _) in enumerate(everyone)}
        return sum(count for place, count in counts.items() if place < own)


def saved_randomness(replica: Replica) -> dict[str, Any] | None:
    """What a checkpoint keeps of it; nothing of a loop that draws from each rank's own streams."""
    randomness = replica.randomness
    if randomness is None:
        return None
    return {"kind": "fast" if randomness.off else "layout-free", "seed": randomness.seed}


def restore_randomness(replica: Replica, saved: Mapping[str, Any] | None) -> None:
    """Go on as a checkpoint was written: with its seed, or with each rank's own streams."""
    randomness = replica.randomness
    if randomness is None:
        return
    if saved is not None and saved["kind"] == "layout-free":
        randomness.seed = int(saved["seed"])
        if randomness.off:
            randomness.note(
                "resumed",
                "randomness: the checkpoint was written with layout-free random numbers; the run "
                "goes on with each rank's own streams, as randomness='fast' says",
            )
    elif not randomness.off:
        randomness.off = True
        written = "before there were layout-free random numbers" if saved is None else (
            "with randomness='fast'"
        )  # fmt: skip
        randomness.note(
            "resumed",
            f"randomness: the checkpoint was written {written}: the run goes on as it was, with "
            "each rank's own streams",
        )
