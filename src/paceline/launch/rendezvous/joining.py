"""The way into the next world: where the meeting is, whether a world runs there, who is in it.

Torch's dynamic rendezvous settles who is part of a world; what a launcher does until then, and how
it waits, is here. :class:`~paceline.launch.rendezvous.multi_node.Meeting` forms the world.

Imports torch at the top, so it is itself imported only when launchers are about to meet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from paceline.config.endpoints import Endpoint
from paceline.errors import ConfigError
from paceline.events import Event
from paceline.launch.logs import LogName
from paceline.launch.rendezvous import heartbeats
from paceline.launch.rendezvous.handler import WaitingStopped
from paceline.launch.rendezvous.membership import Member, Run, World, different
from paceline.launch.rendezvous.records import Book, Current, Places
from paceline.launch.rendezvous.stores import GuardedStore, Line, LineLost
from paceline.launch.rendezvous.torch_state import JsonBackend
from paceline.launch.secret import RunSecret
from paceline.launch.tunnel import Tunnel

LAST_CALL_SECONDS = 3.0
"""How long a world that has its least number of nodes waits for more."""
_KEEP_ALIVE_SECONDS, _KEEP_ALIVE_ATTEMPTS = 60, 10
"""Torch's own signs of life compare clocks; ours do not, so that its are not to strike first."""
_POLL_SECONDS = 0.1
_SAY_SECONDS = 5.0
_LOOK_AROUND_SECONDS = 5.0
_NO_SHARING = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class StartOver(Exception):
    """This generation is over, or not for us: look where the meeting is now."""


class NotTheSameRun(ConfigError):
    """This launcher was asked for something else than those it met."""


@contextlib.contextmanager
def _without_torchs_own_store() -> Iterator[None]:
    """Torch's handler would serve a store for ranks beside the round's; this is its only switch."""
    before = os.environ.get(_NO_SHARING)
    os.environ[_NO_SHARING] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_SHARING]
        else:
            os.environ[_NO_SHARING] = before


@dataclass(frozen=True)
class Settings:
    """Who meets where, and how long things may take; see ``launch.*`` of the config."""

    places: list[Endpoint]
    least: int
    most: int
    node_timeout: float = 10.0
    rejoin_timeout: float = 600.0
    nproc: int = 1
    asked: Mapping[str, str] = dataclasses.field(default_factory=dict)
    secret: RunSecret | None = None
    """Who has it may take part; ``None``: whoever reaches the place may."""


@dataclass(frozen=True)
class RunHooks:
    """What a meeting needs of the one who runs something: where it lies, and who hears of it.

    ``make`` makes the run's folder, on the first round's node 0. ``take`` makes this machine ready
    for a run that another machine made; it raises ConfigError where it cannot be part of it.
    ``write`` appends to the run's events, ``keep_log`` to the copy of a log of another host.
    """

    make: Callable[[], Run]
    take: Callable[[Run], None]
    write: Callable[[Event], None]
    keep_log: Callable[[LogName, str, bytes], None]
    notice: Callable[[str], None]


class Gathering:
    """This launcher as the others get to know it, and its way into the next world.

    ``run``, ``round``, ``node``, ``world`` and ``world_id`` are of the world it was last part of.
    """

    def __init__(self, settings: Settings, hooks: RunHooks) -> None:
        self.settings, self._hooks = settings, hooks
        self.id = uuid.uuid4().hex
        self.host = socket.gethostname()
        self.tunnel = None if settings.secret is None else Tunnel(settings.secret, hooks.notice)
        patience = heartbeats.line_patience(settings.node_timeout)
        self.places = Places(settings.places, patience, self.tunnel)
        self.run: Run | None = None
        self.round = -1
        self.node = -1
        self.world: World | None = None
        self.world_id = ""
        self.closed: str | None = None
        self.stopping = False
        self.deadline = float("inf")
        self._say_at = float("inf")
        self._looked_around = 0.0
        self._came: int | None = None
        """How many machines were there when we last waited for a world in vain."""

    def find(self) -> Book:
        """The meeting place."""
        self._came = None
        return self.places.find(self.deadline, self.pause)

    def begin_to_wait(self) -> None:
        """From now on there is ``rejoin_timeout`` to become part of a world."""
        now = time.monotonic()
        self._say_at = now + _SAY_SECONDS
        self.deadline = now + self.settings.rejoin_timeout

    def join(self, book: Book, expected: int) -> tuple[int, int, int]:
        """Take part in a generation: its number, our number in it, and how many we are."""
        if (why := book.closed()) is not None:
            if self.round >= 0:
                self.closed = why
                raise RendezvousClosedError(why)
            book.open_session()
        generation = self._generation_to_join(book, expected)
        asks = self.asks_for(book, generation, joining=True)
        store = GuardedStore(book.line, asks, self.settings.node_timeout)
        # A place that took over from a lost one does not know who comes; we have an idea.
        expected = book.expected(generation) or expected or self.settings.most
        most = min(self.settings.most, expected)
        handler = DynamicRendezvousHandler.from_backend(
            run_id=book.rendezvous_id(generation),
            store=store,
            backend=JsonBackend(store, book.rendezvous_id(generation), self._hooks.notice),
            min_nodes=self.settings.least,
            max_nodes=max(self.settings.least, most),
            local_addr=self.id,
            timeout=RendezvousTimeout(
                join=timedelta(seconds=max(1.0, self.deadline - time.monotonic())),
                last_call=timedelta(seconds=LAST_CALL_SECONDS),
            ),
            keep_alive_interval=_KEEP_ALIVE_SECONDS,
            keep_alive_max_attempt=_KEEP_ALIVE_ATTEMPTS,
        )
        book.count(generation, 1)
        try:
            with _without_torchs_own_store():
                info = handler.next_rendezvous()
        except BaseException:
            with contextlib.suppress(ConnectionError, KeyError):
                self._came = book.count(generation, -1) + 1
            raise
        return generation, info.rank, info.world_size

    def in_vain(self, problem: BaseException | None) -> str:
        """Why no world has formed in time, in words; ``problem`` is what came in between."""
        least, came = self.settings.least, self._came
        when = f"within {self.settings.rejoin_timeout:g} s (launch.rejoin_timeout)"
        if came is not None and 0 < came < least:
            missing = "the other" if least - came == 1 else f"the {least - came} others"
            return (
                f"{came} of {least} machines came to {self.places} {when}; start the same command "
                f"on {missing}."
            )
        # Torch says only that its store had a problem; which one is told by the store.
        if isinstance(problem, RendezvousConnectionError) and problem.__cause__ is not None:
            problem = problem.__cause__
        why = "" if problem is None else f": {str(problem).rstrip('.')}"
        return f"no world of {least} machines or more formed at {self.places} {when}{why}."

    def _generation_to_join(self, book: Book, expected: int) -> int:
        """The generation that forms; where a world of others runs, wait until it makes room."""
        while True:
            generation = book.generation()
            if not book.has_formed(generation):
                return generation
            current = book.current()
            if current is None or (current.world == self.world_id and self.world_id):
                book.open_next(generation, expected)
            else:
                self._wait_to_be_let_in(book, current, generation)

    def _wait_to_be_let_in(self, book: Book, current: Current, generation: int) -> None:
        """Stand at the door of a world that runs, until it is over or makes room.

        At that of a world which has all the nodes it may have, for as long as it lasts: this one
        is a spare.
        """
        self._check_fits(current)
        self._hooks.notice(
            f"the run is under way on {', '.join(current.hosts)}; {self.host} waits to be let in"
        )
        slot = book.wait_slot(generation)
        beats, moved = book.beats(generation), time.monotonic()
        while book.generation() == generation:
            self.pause()
            book.wait_beat(generation, slot)
            now = time.monotonic()
            if (count := book.beats(generation)) != beats:
                beats, moved = count, now
            elif now - moved > 2 * self.settings.node_timeout:
                book.open_next(generation, 0)  # all of that world are gone
            if book.closed() is not None:
                raise RendezvousClosedError(book.closed())
            if now > self.deadline and len(current.hosts) < self.settings.most:
                raise LineLost(f"the world on {', '.join(current.hosts)} made no room")
            time.sleep(heartbeats.beat_seconds(self.settings.node_timeout) / 2)
        self.deadline = time.monotonic() + self.settings.rejoin_timeout

    def _check_fits(self, current: Current) -> None:
        """Whether this launcher can be part of a run under way, before that is disturbed for it."""
        first = Member("", current.hosts[0], "", 1, 0, asked=current.asked)
        if first.asked != dict(self.settings.asked):
            raise NotTheSameRun(different(self.as_member(0, None), first))
        run = current.run
        if run != self.run:
            self._hooks.take(run)
            self.run = run

    def as_member(self, arrival: int, line: Line | None) -> Member:
        """What this launcher says of itself; ``line`` leads to the meeting place."""
        world = self.world
        return Member(
            id=self.id,
            host=self.host,
            address="" if line is None else line.own_address,
            nproc=self.settings.nproc,
            arrival=arrival,
            asked=dict(self.settings.asked),
            round=self.round,
            node=self.node,
            run=self.run if self.round >= 0 else None,
            peers={} if world is None else {m.id: m.host for m in world.members},
            meeting_address="" if line is None else line.peer_address,
            hosts_meeting=self.places.serves,
        )

    def pause(self) -> None:
        """Called again and again while we wait: ends it when asked to, and says that we do."""
        if self.stopping:
            raise WaitingStopped("asked to stop while waiting for other machines")
        if time.monotonic() > self._say_at:
            self._say_at = float("inf")
            seconds = f"for up to {self.settings.rejoin_timeout:g} s"
            if self.places.trouble is not None:
                told = f"finds no meeting place, and waits {seconds}: {self.places.trouble}"
            elif self.settings.least > 1:
                told = f"waits {seconds} for {self.settings.least} machines or more to meet"
            else:
                told = f"waits {seconds} for the machines that train to let it in"
            self._hooks.notice(f"{self.host} at {self.places}: {told}")

    def asks_for(self, book: Book, generation: int, *, joining: bool) -> Callable[[], None]:
        """A pause that also ends the wait when the generation is over, or formed without us."""
        last = 0.0

        def pause() -> None:
            nonlocal last
            self.pause()
            now = time.monotonic()
            if now - last < 2 * _POLL_SECONDS:
                return
            last = now
            if (why := book.closed()) is not None:
                self.closed = why
                raise RendezvousClosedError(why)
            if book.generation() != generation or (joining and book.has_formed(generation)):
                raise StartOver(f"generation {generation} is over")
            if joining and now > self.deadline:
                raise LineLost("the machines that came did not agree on a world in time")
            self._look_around(book)

        return pause

    def _look_around(self, book: Book) -> None:
        """While we wait at a place that we serve ourselves: the others may meet elsewhere."""
        now = time.monotonic()
        if not self.places.serves or now - self._looked_around < _LOOK_AROUND_SECONDS:
            return
        self._looked_around = now
        other = self.places.look()
        if other is None:
            return
        other.line.close()
        if other.identity != book.identity:
            raise StartOver("the others meet elsewhere")

    def wait_for(self, book: Book, key: str, asks: Callable[[], None]) -> str:
        """What a member has to write down, waited for as long as a node may be silent."""
        found: list[str] = []

        def look() -> bool:
            text = book.read(key)
            found.extend([] if text is None else [text])
            return text is not None

        self.wait_until(look, key, asks)
        return found[0]

    def wait_until(
        self, condition: Callable[[], bool], what: str, asks: Callable[[], None]
    ) -> None:
        """Wait for what the other members have to do, as long as a node may be silent."""
        deadline = time.monotonic() + self.settings.node_timeout
        while not condition():
            asks()
            if time.monotonic() > deadline:
                raise LineLost(f"waited {self.settings.node_timeout:g} s for {what}")
            time.sleep(_POLL_SECONDS)
