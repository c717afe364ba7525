"""A launcher's way into the next world: find the rendezvous, wait for a running world, join.

Torch's dynamic rendezvous decides who is part of a world; what a launcher does until then, and how
it waits, is here. ``MultiNodeRendezvous`` then forms
the world.

Imports torch at the top, so it is itself imported only when a rendezvous is about to start.
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
from paceline.launch.rendezvous import node_heartbeats
from paceline.launch.rendezvous.endpoints import RendezvousEndpoints
from paceline.launch.rendezvous.handler import WaitingStopped
from paceline.launch.rendezvous.membership import Membership, NodeMember, RunInfo, different
from paceline.launch.rendezvous.records import CurrentWorld, RendezvousRecords
from paceline.launch.rendezvous.stores import InterruptibleStore, StoreConnection, StoreUnreachable
from paceline.launch.rendezvous.torch_state import JsonBackend
from paceline.launch.secret import RunSecret
from paceline.launch.tunnel import Tunnel

LAST_CALL_SECONDS = 3.0
"""How long a world that has its minimum number of nodes waits for more, if nobody is expected."""
_KEEP_ALIVE_SECONDS, _KEEP_ALIVE_ATTEMPTS = 60, 10
"""Torch's own heartbeats compare clocks; ours do not, so torch's must never fire first."""
_POLL_SECONDS = 0.1
_SAY_SECONDS = 5.0
_LOOK_AROUND_SECONDS = 5.0
_NO_SHARING = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class StartOver(Exception):
    """This generation is over, or formed without us: look for the rendezvous again."""


class NotTheSameRun(ConfigError):
    """This launcher was asked for another run than the launchers it met."""


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
class RendezvousSettings:
    """Where the rendezvous is, how many nodes it takes, and its timeouts; see ``launch.*``."""

    endpoints: list[Endpoint]
    min_nodes: int
    max_nodes: int
    node_timeout: float = 10.0
    rejoin_timeout: float = 600.0
    nproc: int = 1
    asked: Mapping[str, str] = dataclasses.field(default_factory=dict)
    secret: RunSecret | None = None
    """Who has it may take part; ``None``: whoever reaches the endpoint may."""


@dataclass(frozen=True)
class RunHooks:
    """What the rendezvous calls to create or join a run, to write its events and to report.

    ``make`` makes the run's folder, on the first round's node 0. ``take`` makes this machine ready
    for a run that another machine made; it raises ConfigError where it cannot be part of it.
    ``write`` appends to the run's events, ``keep_log`` to the copy of a log of another host.
    """

    make: Callable[[], RunInfo]
    take: Callable[[RunInfo], None]
    write: Callable[[Event], None]
    keep_log: Callable[[LogName, str, bytes], None]
    notice: Callable[[str], None]


class Joiner:
    """This launcher as the others see it, and its way into the next world.

    ``run``, ``round``, ``node``, ``world`` and ``world_id`` are of the world it was last part of.
    """

    def __init__(self, settings: RendezvousSettings, hooks: RunHooks) -> None:
        self.settings, self._hooks = settings, hooks
        self.id = uuid.uuid4().hex
        self.host = socket.gethostname()
        self.tunnel = None if settings.secret is None else Tunnel(settings.secret, hooks.notice)
        patience = node_heartbeats.call_timeout(settings.node_timeout)
        self.endpoints = RendezvousEndpoints(settings.endpoints, patience, self.tunnel)
        self.run: RunInfo | None = None
        self.round = -1
        self.node = -1
        self.world: Membership | None = None
        self.world_id = ""
        self.closed: str | None = None
        self.stopping = False
        self.deadline = float("inf")
        self._say_at = float("inf")
        self._looked_around = 0.0
        self._came: int | None = None
        """How many machines were there when we last failed to join a world."""

    def find(self) -> RendezvousRecords:
        """Connect to the rendezvous store, waiting for it where necessary."""
        self._came = None
        return self.endpoints.find(self.deadline, self.pause)

    def begin_to_wait(self) -> None:
        """Start the clock: ``rejoin_timeout`` seconds to become part of a world."""
        now = time.monotonic()
        self._say_at = now + _SAY_SECONDS
        self.deadline = now + self.settings.rejoin_timeout

    def join(self, records: RendezvousRecords, expected: int) -> tuple[int, int, int]:
        """Join a generation; returns its number, our rank in it, and how many nodes it has."""
        if (why := records.closed()) is not None:
            if self.round >= 0:
                self.closed = why
                raise RendezvousClosedError(why)
            records.open_session()
        generation = self._generation_to_join(records, expected)
        pause = self.pause_in(records, generation, joining=True)
        store = InterruptibleStore(records.connection, pause, self.settings.node_timeout)
        # A store that took over from a lost one does not know who comes; we may.
        expected = records.expected(generation) or expected
        most = min(self.settings.max_nodes, expected or self.settings.max_nodes)
        # A world that ended to let a machine in must not form without it because that is slow.
        last_call = max(LAST_CALL_SECONDS, self.settings.node_timeout if expected else 0.0)
        handler = DynamicRendezvousHandler.from_backend(
            run_id=records.rendezvous_id(generation),
            store=store,
            backend=JsonBackend(store, records.rendezvous_id(generation), self._hooks.notice),
            min_nodes=self.settings.min_nodes,
            max_nodes=max(self.settings.min_nodes, most),
            local_addr=self.id,
            timeout=RendezvousTimeout(
                join=timedelta(seconds=max(1.0, self.deadline - time.monotonic())),
                last_call=timedelta(seconds=last_call),
            ),
            keep_alive_interval=_KEEP_ALIVE_SECONDS,
            keep_alive_max_attempt=_KEEP_ALIVE_ATTEMPTS,
        )
        records.count(generation, 1)
        try:
            with _without_torchs_own_store():
                info = handler.next_rendezvous()
        except BaseException:
            with contextlib.suppress(ConnectionError, KeyError):
                self._came = records.count(generation, -1) + 1
            raise
        return generation, info.rank, info.world_size

    def why_none_formed(self, problem: BaseException | None) -> str:
        """Why no world has formed in time, in words; ``problem`` is the last error."""
        least, came = self.settings.min_nodes, self._came
        when = f"within {self.settings.rejoin_timeout:g} s (launch.rejoin_timeout)"
        if came is not None and 0 < came < least:
            missing = "the other" if least - came == 1 else f"the {least - came} others"
            return (
                f"{came} of {least} machines came to {self.endpoints} {when}; start the same "
                f"command on {missing}."
            )
        # Torch says only that its store had a problem; the cause says which one.
        if isinstance(problem, RendezvousConnectionError) and problem.__cause__ is not None:
            problem = problem.__cause__
        why = "" if problem is None else f": {str(problem).rstrip('.')}"
        return f"no world of {least} machines or more formed at {self.endpoints} {when}{why}."

    def _generation_to_join(self, records: RendezvousRecords, expected: int) -> int:
        """The generation to join; while a world of others runs, wait until it makes room."""
        while True:
            generation = records.generation()
            if not records.has_formed(generation):
                return generation
            current = records.current()
            if current is None or (current.world == self.world_id and self.world_id):
                records.open_next(generation, expected)
            else:
                self._wait_to_be_let_in(records, current, generation)

    def _wait_to_be_let_in(
        self, records: RendezvousRecords, current: CurrentWorld, generation: int
    ) -> None:
        """Wait until a running world is over or makes room.

        While that world has all the nodes it may have, there is no deadline: this node is a spare.
        """
        self._check_fits(current)
        self._hooks.notice(
            f"the run is under way on {', '.join(current.hosts)}; {self.host} waits to be let in"
        )
        slot = records.wait_slot(generation)
        beats, moved = records.beats(generation), time.monotonic()
        while records.generation() == generation:
            self.pause()
            records.wait_beat(generation, slot)
            now = time.monotonic()
            if (count := records.beats(generation)) != beats:
                beats, moved = count, now
            elif now - moved > 2 * self.settings.node_timeout:
                records.open_next(generation, 0)  # all of that world are gone
            if records.closed() is not None:
                raise RendezvousClosedError(records.closed())
            if now > self.deadline and len(current.hosts) < self.settings.max_nodes:
                raise StoreUnreachable(f"the world on {', '.join(current.hosts)} made no room")
            time.sleep(node_heartbeats.beat_seconds(self.settings.node_timeout) / 2)
        self.deadline = time.monotonic() + self.settings.rejoin_timeout

    def _check_fits(self, current: CurrentWorld) -> None:
        """Check that this launcher can be part of a running run before that is disturbed for it."""
        first = NodeMember("", current.hosts[0], "", 1, 0, asked=current.asked)
        if first.asked != dict(self.settings.asked):
            raise NotTheSameRun(different(self.as_member(0, None), first))
        run = current.run
        if run != self.run:
            self._hooks.take(run)
            self.run = run

    def as_member(self, arrival: int, connection: StoreConnection | None) -> NodeMember:
        """What this launcher reports of itself; ``connection`` leads to the rendezvous store."""
        world = self.world
        return NodeMember(
            id=self.id,
            host=self.host,
            address="" if connection is None else connection.own_address,
            nproc=self.settings.nproc,
            arrival=arrival,
            asked=dict(self.settings.asked),
            round=self.round,
            node=self.node,
            run=self.run if self.round >= 0 else None,
            peers={} if world is None else {m.id: m.host for m in world.members},
            rendezvous_address="" if connection is None else connection.peer_address,
            serves_rendezvous=self.endpoints.serves,
        )

    def pause(self) -> None:
        """Called repeatedly while we wait: stops when asked to, and says once that we wait."""
        if self.stopping:
            raise WaitingStopped("asked to stop while waiting for other machines")
        if time.monotonic() > self._say_at:
            self._say_at = float("inf")
            seconds = f"for up to {self.settings.rejoin_timeout:g} s"
            if self.endpoints.trouble is not None:
                status = f"finds no rendezvous, and waits {seconds}: {self.endpoints.trouble}"
            elif self.settings.min_nodes > 1:
                status = f"waits {seconds} for {self.settings.min_nodes} machines or more to meet"
            else:
                status = f"waits {seconds} for the machines that train to let it in"
            self._hooks.notice(f"{self.host} at {self.endpoints}: {status}")

    def pause_in(
        self, records: RendezvousRecords, generation: int, *, joining: bool
    ) -> Callable[[], None]:
        """A pause that also ends the wait when the generation is over, or formed without us."""
        last = 0.0

        def pause() -> None:
            nonlocal last
            self.pause()
            now = time.monotonic()
            if now - last < 2 * _POLL_SECONDS:
                return
            last = now
            if (why := records.closed()) is not None:
                self.closed = why
                raise RendezvousClosedError(why)
            if records.generation() != generation or (joining and records.has_formed(generation)):
                raise StartOver(f"generation {generation} is over")
            if joining and now > self.deadline:
                raise StoreUnreachable("the machines that came did not agree on a world in time")
            self._look_around(records)

        return pause

    def _look_around(self, records: RendezvousRecords) -> None:
        """While we wait at a store that we serve ourselves: the others may use another one."""
        now = time.monotonic()
        if not self.endpoints.serves or now - self._looked_around < _LOOK_AROUND_SECONDS:
            return
        self._looked_around = now
        other = self.endpoints.look()
        if other is None:
            return
        other.connection.close()
        if other.identity != records.identity:
            raise StartOver("the others use another rendezvous")

    def wait_for(self, records: RendezvousRecords, key: str, pause: Callable[[], None]) -> str:
        """The value that a member has to write, waited for up to the node timeout."""
        found: list[str] = []

        def look() -> bool:
            text = records.read(key)
            found.extend([] if text is None else [text])
            return text is not None

        self.wait_until(look, key, pause)
        return found[0]

    def wait_until(
        self, condition: Callable[[], bool], what: str, pause: Callable[[], None]
    ) -> None:
        """Wait for what the other members have to do, up to the node timeout."""
        deadline = time.monotonic() + self.settings.node_timeout
        while not condition():
            pause()
            if time.monotonic() > deadline:
                raise StoreUnreachable(f"waited {self.settings.node_timeout:g} s for {what}")
            time.sleep(_POLL_SECONDS)
