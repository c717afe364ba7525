"""Where the trainer's events go: memory on every rank; disk and trackers on rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.events import Event, EventLog
from paceline.track import Tracker
from paceline.trainer.history import History


class Reporter:
    """Hands each event to the history, and on rank 0 to the event log and the trackers."""

    def __init__(
        self, run_dir: Path | None, trackers: Sequence[Tracker], history: History, *, main: bool
    ) -> None:
        self.history = history
        self._log = EventLog(run_dir) if main and run_dir is not None else None
        self._trackers = list(trackers) if main else []

    def emit(self, event: Event) -> None:
        """Report one event."""
        self.history.add(event)
        if self._log is not None:
            self._log.write(event)
        for tracker in self._trackers:
            tracker.handle(event)

    def close(self) -> None:
        """Let the trackers finish and close the log."""
        for tracker in self._trackers:
            tracker.close()
        if self._log is not None:
            self._log.close()
