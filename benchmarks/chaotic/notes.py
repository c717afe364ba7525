"""Reading the lines that ranks wrote for their steps: who is where, what counts in the end."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StepNote:
    """A step that a rank has done; ``start`` tells one start of the world from another."""

    time: float
    step: int
    rank: int
    size: int
    pid: int
    host: str
    start: str
    samples: tuple[int, ...]


class Notes:
    """The file of a run, read as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all: list[StepNote] = []
        self._read_to = 0

    def read(self) -> list[StepNote]:
        """What came since the last call; ``all`` has everything."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self._read_to)
            text = file.read()
        whole, end, _ = text.rpartition(b"\n")
        self._read_to += len(whole) + len(end)
        fresh = [_note(line) for line in whole.splitlines()]
        self.all += fresh
        return fresh

    @property
    def step(self) -> int:
        """The last step that any rank has done."""
        return max((note.step for note in self.all), default=0)

    def ranks(self) -> dict[int, StepNote]:
        """The last line of each rank of the newest world."""
        newest = {note.rank: note for note in self.all}
        last = max(newest.values(), key=lambda note: note.time, default=None)
        return {r: n for r, n in newest.items() if last is not None and n.start == last.start}


def _note(line: bytes) -> StepNote:
    fields = json.loads(line)
    return StepNote(**{**fields, "samples": tuple(fields["samples"])})


def that_count(notes: Iterable[StepNote]) -> dict[int, list[StepNote]]:
    """The lines by step, of the last world that did the step: earlier ones were undone.

    A step that not all of its ranks have ended cannot have been saved: it is done again by a later
    world, whose lines then count.
    """
    by_step: dict[int, dict[str, list[StepNote]]] = {}
    for note in notes:
        by_step.setdefault(note.step, {}).setdefault(note.start, []).append(note)
    return {
        step: sorted(
            max(starts.values(), key=lambda lines: lines[-1].time), key=lambda note: note.rank
        )
        for step, starts in sorted(by_step.items())
    }


def repeated(notes: Iterable[StepNote], start: str, step: int) -> int:
    """How many of the steps up to ``step`` a world did again."""
    return len({note.step for note in notes if note.start == start and note.step <= step})
