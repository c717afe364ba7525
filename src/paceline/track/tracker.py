"""What a tracker is: a reader of events that shows or records them."""

from __future__ import annotations

import logging
import queue
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from paceline.events import Event

_CLOSE_SECONDS = 30.0
_MOST_AT_ONCE = 500


class Tracker(Protocol):
    """Anything that wants to know what a run does."""

    def handle(self, event: Event) -> None:
        """Take in one event; called in the order in which things happened."""

    def close(self) -> None:
        """No event will follow."""


def log_warning(message: str) -> None:
    """Where a tracker's troubles go unless someone has a better place for them."""
    logging.getLogger("paceline.track").warning(message)


class Recorder(ABC):
    """A tracker that writes elsewhere, in a thread of its own, and never harms the run.

    A slow disk or server does not slow the training, and a broken one ends the recording with one
    warning through ``on_trouble``, not the run. Subclasses write ``record`` and ``finish``; both
    are called in the thread.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self.on_trouble: Callable[[str], None] = log_warning
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._broken = False

    def handle(self, event: Event) -> None:
        """Take in one event; returns at once."""
        if self._broken:
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name=f"paceline-{self.name}", daemon=True
            )
            # What a library silences while the thread imports it, another thread may undo:
            # Python's filters of warnings are not safe for threads. This one stays.
            warnings.filterwarnings("ignore", message="SOCKS support in urllib3 requires")
            self._thread.start()
        self._queue.put(event)

    def close(self) -> None:
        """Wait until everything is written; an unreachable server is not waited for forever."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._queue.put(None)
        thread.join(_CLOSE_SECONDS)
        if thread.is_alive():
            self.on_trouble(
                f"{self.name} had not written everything {_CLOSE_SECONDS:.0f} s after the end of "
                "the run; it was left behind."
            )

    @abstractmethod
    def record(self, events: Sequence[Event]) -> None:
        """Write a few events, oldest first."""

    @abstractmethod
    def finish(self) -> None:
        """Write out what is left and let go of files and connections."""

    def _work(self) -> None:
        try:
            over = False
            while not over:
                events, over = self._take()
                self.record(events)
            self.finish()
        except Exception as error:
            from paceline.masking import masked

            self._broken = True
            self.on_trouble(
                f"{self.name} stopped recording ({type(error).__name__}: {masked(str(error))}). "
                "The run goes on without it."
            )

    def _take(self) -> tuple[list[Event], bool]:
        """The events that have come in, and whether they are the last; waits for one at least."""
        events: list[Event] = []
        item = self._queue.get()
        while item is not None:
            events.append(item)
            if len(events) == _MOST_AT_ONCE or self._queue.empty():
                return events, False
            item = self._queue.get()
        return events, True
