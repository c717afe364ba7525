"""Following a run from outside: its events as they are written, handed to trackers."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paceline.events import FILE_NAME, LONGEST_LINE, Event, Note, append
from paceline.track.media import located
from paceline.track.progress import Progress
from paceline.track.tracker import Recorder, Tracker
from paceline.untrusted import open_file

_POLL_SECONDS = 0.1
_CHUNK = 1 << 20


class Tail:
    """The end of an event log that may still grow, or not be there yet."""

    def __init__(self, path: str | os.PathLike[str], *, from_end: bool = False) -> None:
        path = Path(path)
        self._path = path / FILE_NAME if path.is_dir() else path
        self._offset = self._path.stat().st_size if from_end and self._path.exists() else 0
        self._partial = b""

    def read(self) -> list[Event]:
        """The events written since the last call; half a line waits for its other half."""
        try:
            with open_file(self._path) as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset, self._partial = 0, b""  # it was deleted, and begun anew
                file.seek(self._offset)
                chunk = file.read(_CHUNK)
        except OSError:  # not there yet, gone, or on a disk that fails just now
            return []
        self._offset += len(chunk)
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        if len(self._partial) > LONGEST_LINE:
            self._partial = b"-"  # no event is as long: what follows of it makes a broken line
        events = (Event.from_json(line) for line in lines)
        return [event for event in events if event is not None]


def follow(
    path: str | os.PathLike[str], stop: threading.Event, *, from_end: bool = False
) -> Iterator[Event]:
    """The events of a run as they are written, until ``stop`` is set and all are read.

    ``path`` is the run folder or its event log, which may not exist yet. ``from_end`` leaves out
    what it already holds.
    """
    tail = Tail(path, from_end=from_end)
    while True:
        last_look = stop.is_set()  # asked before the look: nothing is written after it
        events = tail.read()
        yield from events
        if not events:
            if last_look:
                return
            stop.wait(_POLL_SECONDS)


@contextlib.contextmanager
def following(
    run_dir: str | os.PathLike[str],
    trackers: Sequence[Tracker],
    *,
    shown: Callable[[], bool] = lambda: True,
) -> Iterator[None]:
    """Hand the events that a run in ``run_dir`` writes during the block to ``trackers``.

    While ``shown()`` is false, events are passed over: somebody else shows them.

    A tracker that raises gets no more of them; the run hears of it in a warning, and goes on.
    At the end of the block the trackers are closed.
    """
    feed = _Feed(Path(run_dir), trackers, shown)
    feed.thread.start()
    try:
        yield
    finally:
        feed.stop.set()
        feed.thread.join()


class _Feed:
    """The thread behind ``following``."""

    def __init__(
        self, run_dir: Path, trackers: Sequence[Tracker], shown: Callable[[], bool]
    ) -> None:
        self._shown = shown
        self._has_shown = False
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="paceline-feed", daemon=True)
        self._run_dir = run_dir
        self._tail = Tail(run_dir / FILE_NAME, from_end=True)
        # The progress display comes last, to be able to show the warnings of the others.
        self._trackers = sorted(trackers, key=lambda t: isinstance(t, Progress))
        for tracker in self._trackers:
            if isinstance(tracker, Recorder):
                tracker.on_trouble = self._warn

    def _run(self) -> None:
        while True:
            last_look = self.stop.is_set()
            if not self._hand_on() and last_look:
                break
            self.stop.wait(0 if last_look else _POLL_SECONDS)
        while self._trackers and self._has_shown:
            tracker = self._trackers.pop(0)
            try:
                tracker.close()
            except Exception as error:
                self._warn(f"{_name(tracker)} could not be closed ({_what(error)}).")
            self._hand_on()

    def _hand_on(self) -> bool:
        events = self._tail.read()
        shown = self._shown()
        self._has_shown = self._has_shown or shown
        for event in (located(event, self._run_dir) for event in events if shown):
            for tracker in list(self._trackers):
                try:
                    tracker.handle(event)
                except Exception as error:
                    self._trackers.remove(tracker)
                    self._warn(
                        f"{_name(tracker)} failed ({_what(error)}). The run goes on without it."
                    )
        return bool(events)

    def _warn(self, message: str) -> None:
        """Put a warning into the run's own log, from which all the trackers get it."""
        note = Note(message=message, level="warning")
        if not append(self._run_dir, note):
            for tracker in list(self._trackers):
                if isinstance(tracker, Progress):
                    tracker.handle(note)


def _name(tracker: Tracker) -> str:
    return f"tracker {type(tracker).__name__}"


def _what(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
