"""How far a run has come, read from its events when a rank can no longer report it itself."""

from __future__ import annotations

from pathlib import Path

from paceline.events import FILE_NAME, Event, StepDone

_BLOCK = 1 << 16


class RunProgress:
    """The steps in the events of a run, since ``mark`` and overall.

    Without a folder, or before the run has written anything, nothing is known.
    """

    def __init__(self, events_dir: Path | None) -> None:
        self._file = None if events_dir is None else events_dir / FILE_NAME
        self._mark = 0

    def mark(self) -> None:
        """A new world begins here."""
        self._mark = self._size()

    def moved(self) -> bool | None:
        """Whether a step was done since the mark; ``None`` if not known."""
        if self._file is None or not self._file.exists():
            return None
        return self._last(self._mark) is not None

    def last(self) -> int | None:
        """The number of the last step done, ``None`` if not known."""
        return self._last(0)

    def _size(self) -> int:
        try:
            return 0 if self._file is None else self._file.stat().st_size
        except OSError:
            return 0

    def _last(self, start: int) -> int | None:
        """The last step written at or after ``start``, looked for from the end, block by block."""
        if self._file is None:
            return None
        try:
            with open(self._file, "rb") as file:
                end, rest = file.seek(0, 2), b""
                while end > start:
                    begin = max(start, end - _BLOCK)
                    file.seek(begin)
                    first, *whole = (file.read(end - begin) + rest).split(b"\n")
                    for line in reversed(whole):
                        if (step := _step_in(line)) is not None:
                            return step
                    rest, end = first, begin
                return _step_in(rest)
        except OSError:  # not written yet, or a disk that is gone: not known
            return None


def _step_in(line: bytes) -> int | None:
    if b'"StepDone"' not in line:
        return None
    event = Event.from_json(line.decode(errors="replace"))
    return event.step if isinstance(event, StepDone) else None
