"""The meeting place: finding its store among the candidates, serving it, and what is kept in it.

Launchers meet in generations. Each is a rendezvous of its own for torch: whoever sees that a world
is over opens the next generation, and all its members go there; so nothing of the dead is left in
it. A world that has formed is written down for those who come later: they say that they wait, and
the world makes room for them.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.config.endpoints import Endpoint
from paceline.launch.listening import is_this_machine
from paceline.launch.messages import BadMessage, decode, decode_number, decode_text, encode
from paceline.launch.rendezvous.membership import Run
from paceline.launch.rendezvous.stores import (
    IDENTITY,
    Line,
    LineLost,
    ServedStore,
    StrangerThere,
    reach,
    serve_meeting,
)
from paceline.launch.tunnel import Tunnel

TURN_SECONDS = 5.0
"""How long each further candidate waits for the ones before it, before it serves the meeting."""
_RETRY_SECONDS = 0.3
_MOST_WAITING = 1000
"""Newcomers that are looked for; a count that says more is not one of ours."""


@dataclass(frozen=True)
class Current:
    """The latest world that formed: its generation, round, run and members, for newcomers."""

    world: str
    generation: int
    round: int
    hosts: list[str]
    asked: dict[str, str]
    run: Run


class Book:
    """What is written down at a meeting place, read and written over a line.

    A session is one run's use of it: one that was closed is over, and the next run's launchers
    open another (a place that stays serves many runs).
    """

    def __init__(self, line: Line) -> None:
        self.line = line
        self.identity = decode_text(line.call(lambda store: store.get(IDENTITY)))
        self._session = self._number("session")

    # What is there.

    def current(self) -> Current | None:
        """The latest world, ``None`` before the first one."""
        text = self._get(self._key("current"))
        return decode(Current, text) if text else None

    def generation(self) -> int:
        """The generation that forms, or has formed."""
        return self._number(self._key("generation"))

    def has_formed(self, generation: int) -> bool:
        """Whether that generation's world is complete."""
        return self._count(f"formed/{generation}", 0) > 0

    def expected(self, generation: int) -> int:
        """How many launchers are known to be on their way there; 0 when nobody knows."""
        return self._number(self._key(f"expected/{generation}"))

    def closed(self) -> str | None:
        """Why the run is over, ``None`` while it is not."""
        return self._get(self._key("closed")) or None

    # What is written.

    def arrive(self) -> int:
        """Come in; the number of this launcher among all that came."""
        return self._count("arrivals", 1)

    def count(self, generation: int, change: int) -> int:
        """Come to a generation that forms (1), or leave it again (-1); how many are there then."""
        return self._count(f"came/{generation}", change)

    def open_next(self, generation: int, expected: int) -> None:
        """That generation is over; whoever says so first, it is said once."""
        upcoming = generation + 1
        self.line.call(
            lambda s: s.compare_set(self._key(f"expected/{upcoming}"), "", str(expected))
        )
        self._swap("generation", str(generation) if generation else "", str(upcoming))

    def write_current(self, current: Current) -> None:
        """A world has formed: for newcomers to read."""
        self.line.call(lambda s: s.set(self._key("current"), encode(current)))
        self._count(f"formed/{current.generation}", 1)

    def adopt(self, current: Current) -> int:
        """Write a world that already runs into a place that does not know of it."""
        generation = max(self.generation(), current.generation) + 1
        adopted = dataclasses.replace(current, generation=generation)
        self.write_current(adopted)
        self.line.call(lambda s: s.set(self._key("generation"), str(generation)))
        return generation

    def close(self, why: str) -> None:
        """The run is over; the first reason counts."""
        self._swap("closed", "", why)

    def open_session(self) -> None:
        """Leave a run that was closed behind."""
        before = str(self._session) if self._session else ""
        self.line.call(lambda s: s.compare_set("session", before, str(self._session + 1)))
        self._session = self._number("session")

    def beat(self, generation: int) -> int:
        """A sign of life of the world of that generation, for newcomers."""
        return self._count(f"beat/{generation}", 1)

    def beats(self, generation: int) -> int:
        """How many signs of life that world has given."""
        return self._count(f"beat/{generation}", 0)

    def wait_slot(self, generation: int) -> int:
        """Say that a newcomer waits for the world after that generation; its number."""
        return self._count(f"waiting/{generation}", 1)

    def wait_beat(self, generation: int, slot: int) -> None:
        """The newcomer with that number still waits."""
        self._count(f"waiting/{generation}/{slot}", 1)

    def waiting(self, generation: int) -> list[int]:
        """The beats of each newcomer that waits."""
        slots = min(self._count(f"waiting/{generation}", 0), _MOST_WAITING)
        return [self._count(f"waiting/{generation}/{slot + 1}", 0) for slot in range(slots)]

    def put(self, key: str, value: str) -> None:
        """Write something of a generation."""
        self.line.call(lambda store: store.set(self._key(key), value))

    def read(self, key: str) -> str | None:
        """Read something of a generation; ``None`` where it is not there yet."""
        return self._get(self._key(key))

    def rendezvous_id(self, generation: int) -> str:
        """The name of that generation for torch's rendezvous."""
        return f"{self._session}-{generation}"

    def _key(self, name: str) -> str:
        return f"run{self._session}/{name}"

    def _get(self, key: str) -> str | None:
        if not self.line.call(lambda store: store.check([key])):
            return None
        return decode_text(self.line.call(lambda store: store.get(key)))

    def _number(self, key: str) -> int:
        return decode_number(self._get(key) or "0")

    def _count(self, key: str, amount: int) -> int:
        return int(self.line.call(lambda store: store.add(self._key(key), amount)))

    def _swap(self, key: str, expected: str, desired: str) -> None:
        self.line.call(lambda s: s.compare_set(self._key(key), expected, desired))


class Places:
    """The candidates for the meeting place, in order, and the store served here, if any."""

    def __init__(
        self, endpoints: Sequence[Endpoint], patience: float, tunnel: Tunnel | None = None
    ) -> None:
        self._endpoints, self._patience, self._tunnel = list(endpoints), patience, tunnel
        self._server: ServedStore | None = None
        self._strangers: dict[Endpoint, str] = {}
        self._served: Endpoint | None = None
        self._taken: Endpoint | None = None
        self.trouble: str | None = None
        """Why no meeting place is found; ``None`` while one is, or before anybody looked."""

    def __str__(self) -> str:
        return ",".join(map(str, self._endpoints))

    @property
    def serves(self) -> bool:
        """Whether this launcher serves the meeting."""
        return self._server is not None

    def look(self, *, settle: bool = True) -> Book | None:
        """The meeting place that is there; of several, the one that knows the latest world.

        ``settle``: a store of our own that the others do not use is closed, so that nobody is led
        astray by it.
        """
        found: list[tuple[int, int, Endpoint, Book]] = []
        self._strangers = {}
        for number, endpoint in enumerate(self._endpoints):
            try:
                book = Book(reach(endpoint, self._patience, self._tunnel))
                current = book.current()
            except StrangerThere as stranger:
                self._strangers[endpoint] = str(stranger)
                continue
            except (LineLost, KeyError, BadMessage):
                continue
            found.append((-1 if current is None else current.round, -number, endpoint, book))
        if not found:
            return None
        *others, best = sorted(found, key=lambda entry: entry[:2])
        for *_, book in others:
            book.line.close()
        if settle and best[2] != self._served:
            self.stop_serving()
        return best[3]

    def find(self, deadline: float, pause: Callable[[], None]) -> Book:
        """The meeting place, waited for until ``deadline``; served here when it is our turn.

        Whoever is the n-th candidate waits for n turns, so that an earlier one comes first.
        """
        began = time.monotonic()
        self.trouble = None
        own = [i for i, endpoint in enumerate(self._endpoints) if is_this_machine(endpoint.host)]
        while True:
            pause()
            if (book := self.look()) is not None:
                self.trouble = None
                return book
            now = time.monotonic()
            if own and now - began >= TURN_SECONDS * own[0] and self._serve(own[0]):
                continue
            self.trouble = self._why_none()
            if now > deadline:
                raise LineLost(f"no meeting place at {self} answers: {self.trouble}")
            time.sleep(_RETRY_SECONDS)

    def _why_none(self) -> str:
        """Why no meeting place is found, as far as this machine can tell."""
        found = []
        for endpoint in self._endpoints:
            try:
                socket.getaddrinfo(endpoint.host, endpoint.port)
            except OSError:
                found.append(f"the name {endpoint.host!r} does not resolve")
                continue
            if endpoint in self._strangers:
                found.append(self._strangers[endpoint])
            elif endpoint == self._taken:
                found.append(
                    f"port {endpoint.port} of this machine is taken by something that is no "
                    "meeting place; choose another with --rdzv"
                )
            else:
                found.append(f"nothing answers at {endpoint} yet")
        return "; ".join(found)

    def stop_serving(self) -> None:
        """Close the store that this launcher serves."""
        if self._server is not None:
            self._server.close()
        self._server = self._served = None

    def _serve(self, number: int) -> bool:
        endpoint = self._endpoints[number]
        self.stop_serving()
        try:
            self._server = serve_meeting(endpoint.host, endpoint.port, self._tunnel)
        except LineLost:
            self._taken = endpoint  # maybe another launcher on this machine was faster
            return False
        self._served, self._taken = endpoint, None
        return True
