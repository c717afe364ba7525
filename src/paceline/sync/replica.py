"""The model on this rank, as a step, the ways of synchronising and checkpoints see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from paceline.diagnose.pulse import Pulse
from paceline.errors import TrainingError
from paceline.layout import Coordinate, Layout
from paceline.parallel.distributed_model import DistributedModel
from paceline.parallel.replicate import sync_buffers
from paceline.randomness import ForwardRandomness
from paceline.world import World


@dataclass
class Replica:
    """A model on its layout: whole until it is spread, this rank's part of it afterwards."""

    model: nn.Module
    layout: Layout
    world: World
    steps_done: int = 0
    has_sync_norm: bool = False
    """Whether batch norms compute over the samples of all ranks, in every forward."""
    after_spreading: Callable[[], None] | None = None
    """To be called once the model is spread: what a resume has to wait with until then."""
    randomness: ForwardRandomness | None = None
    """What forward passes draw from; None in a loop of the user's own."""
    parameters: list[nn.Parameter] = field(init=False)
    """Those that this rank holds, frozen ones included."""

    def __post_init__(self) -> None:
        self._spread: DistributedModel | None = None
        self.parameters = list(self.model.parameters())
        self._trainable = [p.requires_grad for p in self.parameters]

    @property
    def coordinate(self) -> Coordinate:
        """The coordinates of this rank in the layout."""
        return self.layout.coordinate(self.world.rank)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.world.device

    @property
    def pulse(self) -> Pulse:
        """Where this rank marks what it is doing."""
        return self.world.pulse

    @property
    def is_spread(self) -> bool:
        """Whether the model is on its layout; with ``tp`` or ``pp`` it is from the first batch."""
        return self._spread is not None

    @property
    def spread(self) -> DistributedModel:
        """The model on its layout."""
        if self._spread is None:
            raise TrainingError(
                f"layout {str(self.layout)!r}: what each rank holds is found by the first batch. "
                "Run a step first."
            )
        return self._spread

    def take_spread(self, spread: DistributedModel) -> None:
        """The model is on its layout from now on."""
        self._spread = spread
        if not spread.is_plain:
            self.parameters = [p for own in spread.held.values() for p in own]
            self._trainable = [p.requires_grad for p in self.parameters]

    def take_notes(self) -> list[str]:
        """What there is to tell the user of spreading the model and of its draws, since last."""
        notes = [] if self._spread is None else self._spread.take_notes()
        return notes if self.randomness is None else notes + self.randomness.take_notes()

    @property
    def holds_whole_model(self) -> bool:
        """Whether nothing has been cut, or not yet."""
        return self._spread is None or self._spread.is_plain

    @property
    def held(self) -> dict[str, list[nn.Parameter]]:
        """The parameters of this rank by name; those of the whole model before it is spread."""
        if self._spread is not None:
            return self._spread.held
        return {name: [parameter] for name, parameter in self.model.named_parameters()}

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank that are not frozen, copies of tied ones included."""
        for name, own in self.spread.held.items():
            for parameter in own:
                if parameter.requires_grad:
                    yield name, parameter

    def follow_freezing(self) -> bool:
        """Let the layout see that parameters were frozen or unfrozen; whether any were."""
        trainable = [p.requires_grad for p in self.parameters]
        if trainable == self._trainable:
            return False
        self._trainable = trainable
        self.spread.follow_freezing()
        return True

    def sync_buffers(self) -> None:
        """Give all data-parallel ranks the buffers of the first. A collective."""
        group = self.spread.data_group
        if group.size > 1:
            with self.pulse.during("waiting"):
                sync_buffers(self.model, group)
