"""Several engines in one checkpoint: each has its tensors and objects below its name."""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.rank_state import Part, RankState
from paceline.checkpoint.saveable import Load, Saved
from paceline.errors import CheckpointError
from paceline.formatting import one_of

_ENGINES = "engines/"


def prefix_of(name: str) -> str:
    """What comes before the names of one engine's tensors; ``""`` is an engine by itself."""
    return f"{_ENGINES}{name}/" if name else ""


def engines_in(manifest: Manifest) -> list[str]:
    """The names of the engines that were saved together; none where it was one by itself."""
    found = [name.removeprefix(_ENGINES) for name in manifest.objects if name.startswith(_ENGINES)]
    return sorted({name.partition("/")[0] for name in found})


def engine_prefix(checkpoint: Checkpoint, engine: str | None) -> str:
    """``prefix_of`` the engine asked for; raises where that is not one of the checkpoint's."""
    names = engines_in(checkpoint.manifest)
    if engine is None and not names:
        return ""
    if engine not in names:
        asked = (
            "give the name of one of them (engine=, --engine)"
            if engine is None
            else (f"none of them is {engine!r}")
        )
        there = f"the engines {one_of(names)}" if names else "one engine, which has no name"
        raise CheckpointError(f"{checkpoint.path} holds {there}: {asked}.")
    return prefix_of(engine)


def added(state: RankState, own: RankState, name: str) -> None:
    """Add what one engine has to ``state``."""
    prefix = prefix_of(name)
    state.tensors |= {prefix + key: part for key, part in own.tensors.items()}
    state.objects |= {prefix + key: value for key, value in own.objects.items()}


class SavedBelow:
    """One engine's part of a checkpoint, under the names that it has by itself."""

    def __init__(self, saved: Saved, name: str) -> None:
        self._saved, self._prefix = saved, prefix_of(name)
        whole = saved.manifest
        self.manifest = dataclasses.replace(
            whole, tensors=self._below(whole.tensors), objects=self._below(whole.objects)
        )

    def _below(self, entries: dict[str, Any]) -> dict[str, Any]:
        at = self._prefix
        return {n.removeprefix(at): entry for n, entry in entries.items() if n.startswith(at)}

    def read_object(self, name: str) -> Any:
        """One of the plain values that the engine saved."""
        return self._saved.read_object(self._prefix + name)

    def load_by(self, load: Load) -> Load:
        """Fills parts under the engine's own names, by ``load``."""

        def fill(parts: dict[str, Part]) -> None:
            load({self._prefix + name: part for name, part in parts.items()})

        return fill
