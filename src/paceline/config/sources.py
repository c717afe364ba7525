"""Where each value of a config was written, so that a message can point at it."""

from __future__ import annotations

from dataclasses import dataclass, field

Path = tuple[str, ...]
"""The place of a key in a config: ``("train", "steps")`` is ``train.steps``."""


@dataclass
class Sources:
    """Maps the path of a key to where it was written: ``"x.yaml:12"`` or ``"--set train.steps=3"``.

    ``origin`` names the whole config (its file), for a problem that no single key is to blame for;
    it is empty for a config built in Python.
    """

    origin: str = ""
    places: dict[Path, str] = field(default_factory=dict)

    def place(self, path: Path) -> str:
        """Where ``path``, or the nearest section around it that was written, stands."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return self.origin

    def message(self, path: Path, text: str) -> str:
        """``text`` after the place that ``path`` was written at."""
        place = self.place(path)
        return f"{place}: {text}" if place else text
