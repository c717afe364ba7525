"""Announcing a running world in the rendezvous store, and noticing launchers that wait to join.

An outage of the rendezvous store does not disturb a running world. When it is back, or another
candidate serves it, the world is recorded there again, so that no new launcher finds it empty and
starts the run a second time.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

from paceline.launch.background_errors import BackgroundErrors, to_stderr
from paceline.launch.rendezvous.endpoints import RendezvousEndpoints
from paceline.launch.rendezvous.node_heartbeats import beat_seconds
from paceline.launch.rendezvous.records import CurrentWorld, RendezvousRecords

# A thread that waits for an answer over a dead link is left to itself.
_PATIENCE_SECONDS = 1.0


class WaitingNodes:
    """How many of the launchers that registered still wait. Pure: it is given counts and times."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._seen: dict[int, tuple[int, float]] = {}

    def count(self, beats: list[int], now: float) -> int:
        """Those whose heartbeat count changed within the timeout."""
        for slot, beat in enumerate(beats):
            if beat > 0 and self._seen.get(slot, (0, 0.0))[0] != beat:
                self._seen[slot] = (beat, now)
        return sum(1 for _, moved in self._seen.values() if now - moved <= self._timeout)


class WorldAnnouncer:
    """A thread that keeps a world recorded in the rendezvous store, and looks for changes there."""

    def __init__(
        self,
        endpoints: RendezvousEndpoints,
        records: RendezvousRecords,
        current: CurrentWorld,
        *,
        is_main: bool,
        has_room: bool,
        timeout: float,
        report_waiting: Callable[[int], None],
        notice: Callable[[str], None] = to_stderr,
    ) -> None:
        self._endpoints, self._records, self._current = endpoints, records, current
        self._is_main, self._has_room, self._timeout = is_main, has_room, timeout
        self._report_waiting = report_waiting
        self._errors = BackgroundErrors("the watch over the rendezvous", notice)
        self._waiting_nodes = WaitingNodes(timeout)
        self._reported = 0
        self._over_since: float | None = None
        self._disconnected = False
        self._stop = threading.Event()
        self.lost: str | None = None
        self.closed: str | None = None
        self._thread = threading.Thread(target=self._watch, name="paceline-announcer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(_PATIENCE_SECONDS)
        self._records.connection.close()

    def close(self, why: str) -> None:
        """Record that the run is over; a store that does not answer is no error."""
        try:
            self._records.close(why)
        except (ConnectionError, KeyError):
            return

    def _watch(self) -> None:
        beat = beat_seconds(self._timeout)
        while not self._stop.wait(beat):
            try:
                with self._errors.reported(but=(ConnectionError, KeyError)):
                    if self._disconnected:
                        self._find_again()
                    self._once()
            except (ConnectionError, KeyError):
                self._disconnected = True

    def _find_again(self) -> None:
        records = self._endpoints.look(settle=False)
        if records is None:
            raise ConnectionError("no rendezvous answers")
        self._records, self._disconnected = records, False
        known = records.current()
        if known is not None and known.world == self._current.world:
            self._current = known
        elif known is not None and known.round > self._current.round:
            self.lost = self.lost or _without_us(known)
        elif self._is_main:
            generation = records.adopt(self._current)
            self._current = dataclasses.replace(self._current, generation=generation)
        else:
            raise ConnectionError("node 0 has not been here yet")

    def _once(self) -> None:
        generation = self._current.generation
        self._records.beat(generation)
        self.closed = self.closed or self._records.closed()
        if self._records.generation() != generation:
            self._note_over()
        elif self._is_main and self._has_room:
            waiting = self._waiting_nodes.count(self._records.waiting(generation), time.monotonic())
            if waiting != self._reported:
                self._report_waiting(waiting)
                self._reported = waiting

    def _note_over(self) -> None:
        """Somebody opened the next generation: our ranks are about to end, or we are cut off."""
        known = self._records.current()
        if known is not None and known.world != self._current.world:
            self.lost = self.lost or _without_us(known)
        now = time.monotonic()
        self._over_since = self._over_since or now
        if now - self._over_since > self._timeout:
            self.lost = self.lost or "the other nodes have left this world to form another"


def _without_us(known: CurrentWorld) -> str:
    return f"the others have gone on without this node, on {', '.join(known.hosts)}"
