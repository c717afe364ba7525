"""A world's presence at the meeting place: newcomers see that it lives, and it sees them.

An outage of the meeting place does not disturb a world that runs. When the place is back, or
another candidate serves it, the world is written down there anew, so that nobody who comes takes
the place for empty and starts the run a second time.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

from paceline.launch.endurance import Endurance, to_stderr
from paceline.launch.rendezvous.heartbeats import beat_seconds
from paceline.launch.rendezvous.records import Book, Current, Places

# A thread that waits for an answer over a dead link is left to itself.
_PATIENCE_SECONDS = 1.0


class Waiters:
    """How many newcomers wait, of those who once said so. Pure: it is told beats and times."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._seen: dict[int, tuple[int, float]] = {}

    def count(self, beats: list[int], now: float) -> int:
        """Those whose beats moved within the timeout."""
        for slot, beat in enumerate(beats):
            if beat > 0 and self._seen.get(slot, (0, 0.0))[0] != beat:
                self._seen[slot] = (beat, now)
        return sum(1 for _, moved in self._seen.values() if now - moved <= self._timeout)


class Presence:
    """A thread that keeps a world known at the meeting place, and looks for what is new there."""

    def __init__(
        self,
        places: Places,
        book: Book,
        current: Current,
        *,
        is_main: bool,
        has_room: bool,
        timeout: float,
        tell_waiting: Callable[[int], None],
        notice: Callable[[str], None] = to_stderr,
    ) -> None:
        self._places, self._book, self._current = places, book, current
        self._is_main, self._has_room, self._timeout = is_main, has_room, timeout
        self._tell_waiting = tell_waiting
        self._endurance = Endurance("the watch over the meeting place", notice)
        self._waiters = Waiters(timeout)
        self._told = 0
        self._over_since: float | None = None
        self._lost_line = False
        self._stop = threading.Event()
        self.lost: str | None = None
        self.closed: str | None = None
        self._thread = threading.Thread(target=self._watch, name="paceline-presence", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(_PATIENCE_SECONDS)
        self._book.line.close()

    def close(self, why: str) -> None:
        """Write down that the run is over; a place that does not answer is no error."""
        try:
            self._book.close(why)
        except (ConnectionError, KeyError):
            return

    def _watch(self) -> None:
        beat = beat_seconds(self._timeout)
        while not self._stop.wait(beat):
            try:
                with self._endurance.turn(but=(ConnectionError, KeyError)):
                    if self._lost_line:
                        self._find_again()
                    self._once()
            except (ConnectionError, KeyError):
                self._lost_line = True

    def _find_again(self) -> None:
        book = self._places.look(settle=False)
        if book is None:
            raise ConnectionError("no meeting place answers")
        self._book, self._lost_line = book, False
        known = book.current()
        if known is not None and known.world == self._current.world:
            self._current = known
        elif known is not None and known.round > self._current.round:
            self.lost = self.lost or _without_us(known)
        elif self._is_main:
            generation = book.adopt(self._current)
            self._current = dataclasses.replace(self._current, generation=generation)
        else:
            raise ConnectionError("node 0 has not been here yet")

    def _once(self) -> None:
        generation = self._current.generation
        self._book.beat(generation)
        self.closed = self.closed or self._book.closed()
        if self._book.generation() != generation:
            self._note_over()
        elif self._is_main and self._has_room:
            waiting = self._waiters.count(self._book.waiting(generation), time.monotonic())
            if waiting != self._told:
                self._tell_waiting(waiting)
                self._told = waiting

    def _note_over(self) -> None:
        """Somebody opened the next generation: our ranks are about to end, or cut off from it."""
        known = self._book.current()
        if known is not None and known.world != self._current.world:
            self.lost = self.lost or _without_us(known)
        now = time.monotonic()
        self._over_since = self._over_since or now
        if now - self._over_since > self._timeout:
            self.lost = self.lost or "the other nodes have left this world to form another"


def _without_us(known: Current) -> str:
    return f"the others have gone on without this node, on {', '.join(known.hosts)}"
