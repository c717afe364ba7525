"""Where each value of a config was written, so that a message can point at it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Path = tuple[str, ...]
"""The place of a key in a config: ``("train", "steps")`` is ``train.steps``."""

MOST_MESSAGES = 100
_LONGEST_MESSAGE = 2000
_AFTER_EVERY_LINE = 10**9


@dataclass
class Sources:
    """Maps the path of a key to where it was written: ``x.yaml:12`` or ``--set train.steps=3``.

    ``origin`` names the whole config (its file), for a problem that no single key is to blame for;
    it is empty for a config built in Python.
    """

    origin: str = ""
    places: dict[Path, tuple[int, str]] = field(default_factory=dict)
    mapped: list[str] = field(default_factory=list)
    """What each key of another library's config has become."""
    notes: list[str] = field(default_factory=list)
    """What is different here from that library."""
    spread_layout: str = "auto"
    """A layout that, like ``auto``, is spread over every device: what ``deepspeed`` made of it."""

    def add_lines(self, lines: Mapping[Path, int]) -> None:
        """Keys written in the file ``origin``, each on its line."""
        for path, line in lines.items():
            self.places[path] = (line, f"{self.origin}:{line}")

    def add_override(self, path: Path, text: str) -> None:
        """A value laid over ``path`` and everything below it by ``text``."""
        for old in [old for old in self.places if old[: len(path)] == path]:
            del self.places[old]
        self.places[path] = (_AFTER_EVERY_LINE + len(self.places), text)

    def rename(self, written: Path, meant: Path) -> None:
        """Let ``meant`` and what is below it lead to where ``written`` stands."""
        for old in [old for old in self.places if old[: len(written)] == written]:
            self.places[(*meant, *old[len(written) :])] = self.places[old]

    def place(self, path: Path) -> tuple[int, str]:
        """Where ``path`` stands; if nowhere, then a key below it, else the section around it."""
        if path in self.places:
            return self.places[path]
        below = [place for found, place in self.places.items() if found[: len(path)] == path]
        if below and path:
            return max(below)
        for length in range(len(path) - 1, 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return 0, self.origin

    def culprit(self, *paths: Path) -> Path:
        """Of keys that do not go together, the one to point at: an override, else the first."""
        written = [path for path in paths if path in self.places]
        overrides = [path for path in paths if self._is_overridden(path)]
        return (overrides or written or list(paths))[0]

    def _is_overridden(self, path: Path) -> bool:
        """Whether ``path``, or a section around it as a whole, was laid over the config."""
        around = [path[:length] for length in range(len(path), 0, -1)]
        found = next((self.places[outer] for outer in around if outer in self.places), None)
        return found is not None and found[0] >= _AFTER_EVERY_LINE

    def messages(self, problems: Iterable[tuple[Path, str]]) -> list[str]:
        """Each text after the place its key was written at, in the order of the file."""
        placed = [(*self.place(path), text) for path, text in problems]
        placed.sort(key=lambda item: item[0])
        told = [f"{place}: {_short(text)}" if place else _short(text) for _, place, text in placed]
        left_out = len(told) - MOST_MESSAGES
        more = [f"… and {left_out} more problems"] if left_out > 0 else []
        return told[:MOST_MESSAGES] + more


def _short(text: str) -> str:
    """``text``, in which a value of any length may be repeated, as a person can read it."""
    if len(text) <= _LONGEST_MESSAGE:
        return text
    half = _LONGEST_MESSAGE // 2
    return f"{text[:half]} […] {text[-half:]}"
