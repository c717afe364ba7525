"""Where the trainer's events go: memory on every rank; disk and trackers on rank 0."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from paceline.events import Event, EventLog, Note
from paceline.events.wording import checkpoint_trouble, line_of, warns
from paceline.launch import notices
from paceline.track import Tracker
from paceline.track.media import located
from paceline.trainer.history import History


class Reporter:
    """Hands each event to the history, and on rank 0 to the event log and the trackers."""

    def __init__(
        self,
        run_dir: Path | None,
        trackers: Sequence[Tracker],
        history: History,
        *,
        main: bool,
        warns: bool,
    ) -> None:
        self.history = history
        # Where nobody shows events, troubles with checkpoints become Python's warnings.
        self._warns = main and warns
        self._log = EventLog(run_dir, self._say) if main and run_dir is not None else None
        self._trackers = list(trackers) if main else []
        self.files: Path | None = run_dir
        """Where the files are that events name."""

    def emit(self, event: Event) -> None:
        """Report one event."""
        self.history.add(event)
        if self._warns and (told := checkpoint_trouble(event)) is not None:
            warnings.warn(told, stacklevel=3)
        lost = self._log is not None and not self._log.write(event)
        # Whoever shows the events of this run cannot read this one there.
        if lost and not self._trackers and (line := line_of(event)) is not None:
            notices.send(f"warning: {line}" if warns(event) else line)
        seen = located(event, self.files)
        for tracker in list(self._trackers):
            self._shielded(tracker, partial(tracker.handle, seen))

    def close(self) -> None:
        """Let the trackers finish and close the log."""
        for tracker in list(self._trackers):
            self._shielded(tracker, tracker.close)
        if self._log is not None:
            self._log.close()

    def _say(self, message: str) -> None:
        """What is wrong with the log: to whoever shows the run."""
        note = Note(message=message, level="warning")
        for tracker in list(self._trackers):
            self._shielded(tracker, partial(tracker.handle, note))
        if not self._trackers and not notices.send(f"warning: {message}"):
            warnings.warn(message, stacklevel=4)

    def _shielded(self, tracker: Tracker, call: Callable[[], None]) -> None:
        """A tracker that raises gets no more events; the run says so and goes on."""
        try:
            call()
        except Exception as error:
            self._trackers.remove(tracker)
            self.emit(
                Note(
                    level="warning",
                    message=f"{type(tracker).__name__} stopped recording ({type(error).__name__}: "
                    f"{error}). The run goes on without it.",
                )
            )
