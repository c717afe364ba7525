"""What can be saved: an engine, seen from its checkpoints, and objects with a ``state_dict``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.rank_state import Part, RankState
from paceline.errors import TrainingError
from paceline.layout import Layout
from paceline.world import World


class Stateful(Protocol):
    """Anything that can be saved: it gives a ``state_dict`` and takes one back."""

    def state_dict(self) -> Any:
        """What has to survive."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take over what an earlier ``state_dict`` gave."""


class Saved(Protocol):
    """A checkpoint, as far as an engine looks at it."""

    @property
    def manifest(self) -> Manifest:
        """What it holds."""

    def read_object(self, name: str) -> Any:
        """A plain value that it holds."""


Load = Callable[[dict[str, Part]], None]
"""Fills the memory of the parts it is given from a checkpoint. A collective."""


class SavedRankState(Protocol):
    """The state of an engine as each rank holds it."""

    def collect(self) -> RankState:
        """What this rank has of the state; shares its memory."""

    def take(self, saved: Saved, load: Load) -> None:
        """Take over what a checkpoint holds, at this or another layout. Every rank calls it."""

    @property
    def is_pending(self) -> bool:
        """Whether ``take`` waits for the first batch, before which there is no memory."""


class SavedEngine(Protocol):
    """An engine, as far as its checkpoints look at it."""

    world: World
    layout: Layout

    @property
    def steps_done(self) -> int:
        """How many steps the model was trained for."""

    @property
    def rank_state(self) -> SavedRankState:
        """Its state as each rank holds it."""

    def settle(self) -> None:
        """Wait for the last step and raise if it was not finite."""


def checked_objects(objects: Any) -> Mapping[str, Stateful]:
    """``objects``, once everything in it is known to have a name and a state."""
    if not isinstance(objects, Mapping):
        raise TrainingError(
            f"objects must be a dict from name to object, not a {type(objects).__name__}."
        )
    for name, saved in objects.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise TrainingError(f"objects: {name!r} must be a name without a slash.")
        for method in ("state_dict", "load_state_dict"):
            if isinstance(saved, type) or not callable(getattr(saved, method, None)):
                raise TrainingError(
                    f"objects: {name!r} is a {type(saved).__name__} without {method}(), so it "
                    "cannot be saved."
                )
    return objects
