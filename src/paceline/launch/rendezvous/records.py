"""What launchers keep in the rendezvous store: generations, the current world, who waits to join.

A generation is one attempt to form a world, and a rendezvous of its own for torch: whoever sees
that a world is over opens the next generation, and its members join that one, which therefore holds
nothing of dead launchers. A world that has formed is recorded for launchers that come later: they
register as waiting, and the world makes room for them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from paceline.launch.messages import decode, decode_number, decode_text, encode
from paceline.launch.rendezvous.membership import RunInfo
from paceline.launch.rendezvous.stores import IDENTITY, StoreConnection

_MOST_WAITING = 1000
"""How many waiting launchers are looked for; a higher count was not written by one of ours."""


@dataclass(frozen=True)
class CurrentWorld:
    """The latest world that formed: its generation, round, run and hosts, for new launchers."""

    world: str
    generation: int
    round: int
    hosts: list[str]
    asked: dict[str, str]
    run: RunInfo


class RendezvousRecords:
    """The records of one rendezvous store, read and written over a connection.

    A session is one run's use of the store. When that run is closed, the launchers of the next one
    open a new session, so a long-lived store serves many runs.
    """

    def __init__(self, connection: StoreConnection) -> None:
        self.connection = connection
        self.identity = decode_text(connection.call(lambda store: store.get(IDENTITY)))
        self._session = self._number("session")

    # Reading.

    def current(self) -> CurrentWorld | None:
        """The latest world, ``None`` before the first one."""
        text = self._get(self._key("current"))
        return decode(CurrentWorld, text) if text else None

    def generation(self) -> int:
        """The generation that forms, or has formed."""
        return self._number(self._key("generation"))

    def has_formed(self, generation: int) -> bool:
        """Whether that generation's world is complete."""
        return self._count(f"formed/{generation}", 0) > 0

    def expected(self, generation: int) -> int:
        """How many launchers are expected there; 0 when that is not known."""
        return self._number(self._key(f"expected/{generation}"))

    def closed(self) -> str | None:
        """Why the run is over, ``None`` while it is not."""
        return self._get(self._key("closed")) or None

    # Writing.

    def arrive(self) -> int:
        """Register; returns the number of this launcher among all that ever registered."""
        return self._count("arrivals", 1)

    def count(self, generation: int, change: int) -> int:
        """Enter a generation that forms (1), or leave it again (-1); returns how many are in it."""
        return self._count(f"came/{generation}", change)

    def open_next(self, generation: int, expected: int) -> None:
        """End that generation and open the next; only the first call for a generation counts."""
        upcoming = generation + 1
        self.connection.call(
            lambda s: s.compare_set(self._key(f"expected/{upcoming}"), "", str(expected))
        )
        self._swap("generation", str(generation) if generation else "", str(upcoming))

    def write_current(self, current: CurrentWorld) -> None:
        """Record a world that has formed, for new launchers to read."""
        self.connection.call(lambda s: s.set(self._key("current"), encode(current)))
        self._count(f"formed/{current.generation}", 1)

    def adopt(self, current: CurrentWorld) -> int:
        """Record a world that already runs in a store that does not know of it."""
        generation = max(self.generation(), current.generation) + 1
        adopted = dataclasses.replace(current, generation=generation)
        self.write_current(adopted)
        self.connection.call(lambda s: s.set(self._key("generation"), str(generation)))
        return generation

    def close(self, why: str) -> None:
        """Mark the run as over; the first reason counts."""
        self._swap("closed", "", why)

    def open_session(self) -> None:
        """Start a new session after a run that was closed."""
        before = str(self._session) if self._session else ""
        self.connection.call(lambda s: s.compare_set("session", before, str(self._session + 1)))
        self._session = self._number("session")

    def beat(self, generation: int) -> int:
        """Send a heartbeat of the world of that generation, for new launchers."""
        return self._count(f"beat/{generation}", 1)

    def beats(self, generation: int) -> int:
        """How many heartbeats that world has sent."""
        return self._count(f"beat/{generation}", 0)

    def wait_slot(self, generation: int) -> int:
        """Register as waiting for the world after that generation; returns the slot."""
        return self._count(f"waiting/{generation}", 1)

    def wait_beat(self, generation: int, slot: int) -> None:
        """Send a heartbeat of the waiting launcher in that slot."""
        self._count(f"waiting/{generation}/{slot}", 1)

    def waiting(self, generation: int) -> list[int]:
        """How many heartbeats each waiting launcher has sent."""
        slots = min(self._count(f"waiting/{generation}", 0), _MOST_WAITING)
        return [self._count(f"waiting/{generation}/{slot + 1}", 0) for slot in range(slots)]

    def put(self, key: str, value: str) -> None:
        """Write a value of this session."""
        self.connection.call(lambda store: store.set(self._key(key), value))

    def read(self, key: str) -> str | None:
        """Read a value of this session; ``None`` where it is not there yet."""
        return self._get(self._key(key))

    def rendezvous_id(self, generation: int) -> str:
        """The name of that generation for torch's rendezvous."""
        return f"{self._session}-{generation}"

    def _key(self, name: str) -> str:
        return f"run{self._session}/{name}"

    def _get(self, key: str) -> str | None:
        if not self.connection.call(lambda store: store.check([key])):
            return None
        return decode_text(self.connection.call(lambda store: store.get(key)))

    def _number(self, key: str) -> int:
        return decode_number(self._get(key) or "0")

    def _count(self, key: str, amount: int) -> int:
        return int(self.connection.call(lambda store: store.add(self._key(key), amount)))

    def _swap(self, key: str, expected: str, desired: str) -> None:
        self.connection.call(lambda s: s.compare_set(self._key(key), expected, desired))
