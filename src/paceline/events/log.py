"""The event log of a run: ``events.jsonl``, one event a line, written and read."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.events.event import Event, Moment
from paceline.untrusted import MIB, open_file, open_to_append, read_lines

FILE_NAME = "events.jsonl"
MOST_BYTES = 2048 * MIB
"""The largest event log that is read: that of some ten million steps."""
LONGEST_LINE = 16 * MIB
"""The longest event: the stacks of a few thousand ranks."""


@dataclass(frozen=True, kw_only=True)
class EventsLost(Event):
    """``count`` events before this one could not be written, since ``since``, because of ``error``.

    ``what`` counts them by kind.
    """

    count: int
    since: Moment
    error: str
    what: dict[str, int] = field(default_factory=dict)


class EventLog:
    """Appends events to ``<folder>/events.jsonl``, one unbuffered write a line.

    Several processes may append to one file: each line is a single ``O_APPEND`` write.

    A run goes on when its events cannot be written (a full disk, a quota, one that fails or became
    read-only): they are dropped and counted, ``say`` is told once, and as soon as there is room
    again the log says how many are missing. A file that was deleted is made anew. That the log
    cannot even be opened is an ``OSError``.
    """

    def __init__(
        self, folder: str | os.PathLike[str], say: Callable[[str], None] | None = None
    ) -> None:
        self.path = Path(folder) / FILE_NAME
        self._say = say
        self._lost: Counter[str] = Counter()
        self._lost_since = 0.0
        self._error = ""
        self._file = self._open()

    def write(self, event: Event) -> bool:
        """Append one event; whether it was written."""
        lines = [event]
        if self._lost:
            lines.insert(0, self._of_the_lost())
        data = b"".join(line.to_json().encode() + b"\n" for line in lines)
        try:
            self._append(data)
        except OSError as error:
            self._lose(event, error)
            return False
        self._lost.clear()
        return True

    def close(self) -> None:
        """Close the file; further writes fail."""
        if self._lost:
            with contextlib.suppress(OSError):
                self._append(self._of_the_lost().to_json().encode() + b"\n")
        self._file.close()

    def _open(self) -> io.FileIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Readable, too: see _append.
        return io.FileIO(open_to_append(self.path), "ab+")

    def _append(self, data: bytes) -> None:
        found = os.fstat(self._file.fileno())
        if found.st_nlink == 0:
            file, self._file = self._file, self._open()
            file.close()
            if self._say is not None:
                self._say(f"{self.path} was deleted while the run goes on; it is begun anew.")
            found = os.fstat(self._file.fileno())
        # A writer that was killed, or met a full disk, may have left half a line.
        broken = found.st_size and os.pread(self._file.fileno(), 1, found.st_size - 1) != b"\n"
        data = b"\n" + data if broken else data
        written = self._file.write(data)
        if written != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _lose(self, event: Event, error: OSError) -> None:
        if not self._lost:
            self._lost_since, self._error = event.time, error.strerror or str(error)
            if self._say is not None:
                self._say(
                    f"the run's events cannot be written to {self.path} ({self._error}). The run "
                    "goes on, and they are dropped until that is put right."
                )
        self._lost[type(event).__name__] += 1

    def _of_the_lost(self) -> EventsLost:
        return EventsLost(
            count=self._lost.total(),
            since=self._lost_since,
            error=self._error,
            what=dict(self._lost),
        )


def append(folder: str | os.PathLike[str], event: Event) -> bool:
    """Add one event to the log in ``folder``; whether that could be done."""
    try:
        log = EventLog(folder)
    except OSError:
        return False
    try:
        return log.write(event)
    finally:
        log.close()


def read(path: str | os.PathLike[str]) -> Iterator[Event]:
    """The events of a run, oldest first; ``path`` is the file or the run folder that holds it.

    Lines that hold none are passed over.
    """
    for line in read_log_lines(path):
        if line is not None and (event := Event.from_json(line)) is not None:
            yield event


def read_log_lines(path: str | os.PathLike[str]) -> Iterator[bytes | None]:
    """The lines of an event log; ``None`` for one longer than any event (``LONGEST_LINE``).

    Raises ``OSError`` where it is not a regular file, or larger than ``MOST_BYTES``.
    """
    path = Path(path)
    if path.is_dir():
        path = path / FILE_NAME
    with open_file(path, MOST_BYTES) as file:
        yield from read_lines(file, LONGEST_LINE)
