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
"""Steps after which ranks no longer ask each other for a model that has drawn nothing."""


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

    A loader of Paceline knows it. Batches from elsewhere are counted by all ranks together, unless
    ``alone``: replicas that train alone do not wait for each other.
    """

    def __init__(self, replica: Replica, *, alone: bool) -> None:
        self._replica, self._alone = replica, alone
        self._asked = 0
        self._nobody_draws = False

    def of(self, batch: Any, *, asks: bool) -> Tensor | None:
        """The number of each sample in the global batch; None where the batch does not tell."""
        try:
            samples = batch_size(batch)
        except DataError:
            return None
        start = self._start(batch, samples, asks=asks)
        return None if start is None else torch.arange(start, start + samples)

    def _start(self, batch: Any, samples: int, *, asks: bool) -> int | None:
        layout, world = self._replica.layout, self._replica.world
        if layout.dp == 1:
            return 0
        if (known := start_of(batch)) is not None:
            return known
        own = self._replica.coordinate.dp
        if not asks or self._alone:
            return own * samples
        if self._nobody_draws:
            return None
        randomness = self._replica.randomness
        assert randomness is not None
        everyone = collectives.all_gather_object((samples, randomness.drew))
        self._asked += 1
        self._nobody_draws = self._asked >= _ASKED and not any(drew for _, drew in everyone)
        counts = {layout.coordinate(r).dp: n for r, (n, _) in enumerate(everyone[: world.size])}
        return sum(count for place, count in counts.items() if place < own)


def saved_randomness(replica: Replica) -> dict[str, Any]:
    """What a checkpoint keeps of it."""
    randomness = replica.randomness
    assert randomness is not None
    return {"kind": "fast" if randomness.off else "layout-free", "seed": randomness.seed}


def restore_randomness(replica: Replica, saved: Mapping[str, Any] | None) -> None:
    """Go on as a checkpoint was written: with its seed, or with each rank's own streams."""
    randomness = replica.randomness
    assert randomness is not None
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
