"""Several engines in one checkpoint: each has its tensors and objects below its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.rank_state import Part, RankState
from paceline.checkpoint.saveable import Load, Saved, SavedEngine
from paceline.errors import CheckpointError, TrainingError

_ENGINES = "engines/"


def named_engines(given: SavedEngine | Mapping[str, SavedEngine]) -> dict[str, SavedEngine]:
    """Engines by name; one by itself has none (``""``)."""
    if not isinstance(given, Mapping):
        return {"": given}
    if not given:
        raise TrainingError("Checkpoints: there is no engine to save in an empty dict.")
    for name, engine in given.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise TrainingError(f"Checkpoints: the engine {name!r} needs a name without a slash.")
        if not hasattr(engine, "rank_state"):
            raise TrainingError(
                f"Checkpoints: {name!r} is a {type(engine).__name__}, not a paceline.Engine. "
                "What else is to be saved goes into objects=."
            )
    first = next(iter(given.values()))
    for name, engine in given.items():
        if engine.world is not first.world:
            raise TrainingError(f"Checkpoints: the engine {name!r} is in another world.")
    if len({id(engine) for engine in given.values()}) < len(given):
        raise TrainingError(f"Checkpoints: one engine has several names: {', '.join(given)}.")
    return dict(given)


def layouts_in_words(engines: Mapping[str, SavedEngine]) -> str:
    """The layout; where engines have several, each one's."""
    layouts = {name: str(engine.layout) for name, engine in engines.items()}
    if len(set(layouts.values())) == 1:
        return next(iter(layouts.values()))
    return "; ".join(f"{name} {layout}" for name, layout in layouts.items())


def check_engines(checkpoint: Checkpoint, engines: Mapping[str, SavedEngine]) -> None:
    """Raise where the checkpoint is not of these engines."""
    there, here = engines_in(checkpoint.manifest), sorted(name for name in engines if name)
    if there != here:
        raise CheckpointError(
            f"{checkpoint.path} holds {_in_words(there)}, and to be restored is {_in_words(here)}. "
            "Give Checkpoints the engines that were saved, under the names they had."
        )


def _in_words(names: Sequence[str]) -> str:
    if not names:
        return "one engine without a name"
    return f"{'the engine' if len(names) == 1 else 'engines'} {', '.join(names)}"


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
        raise CheckpointError(f"{checkpoint.path} holds {_in_words(names)}: {asked}.")
    return prefix_of(engine)


def add_engine(state: RankState, own: RankState, name: str) -> None:
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
