"""The rendezvous of launchers on several machines. Each world they form is a round.

Torch's dynamic rendezvous on a c10d store decides who is part of a world. We add what it lacks:
every generation is a rendezvous of its own (``records.py``), every call over the network ends in
time (``stores.py``), the members exchange what they run and what they know (``membership.py``), the
launcher of node 0 serves the store of the round, and all send heartbeats (``heartbeats.py``).

The timeouts follow from the config. A machine that stops or is cut off is lost after
``launch.node_timeout``. A world forms as soon as all expected machines are there, at the latest
``LAST_CALL_SECONDS`` (``joining.py``) after the minimum is; a launcher waits for that up to
``launch.rejoin_timeout``.

Imports torch at the top, so it is itself imported only when a rendezvous is about to start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from paceline.errors import ConfigError
from paceline.events import Event, NodeJoined, NodeLeft, Restarting
from paceline.launch.listening import listen
from paceline.launch.messages import BadMessage, decode, encode
from paceline.launch.rendezvous import heartbeats
from paceline.launch.rendezvous.announcing import Presence
from paceline.launch.rendezvous.forwarding import Mailbox
from paceline.launch.rendezvous.handler import Rounds
from paceline.launch.rendezvous.heartbeats import RoundWatch
from paceline.launch.rendezvous.joining import (
    Gathering,
    NotTheSameRun,
    RunHooks,
    Settings,
    StartOver,
)
from paceline.launch.rendezvous.keepalive import Tether, Tethers
from paceline.launch.rendezvous.membership import Member, Run, World, agree, different, gone, joined
from paceline.launch.rendezvous.records import Book, Current
from paceline.launch.rendezvous.stores import GuardedStore, Line, ServedStore
from paceline.launch.tunnel import Gate

_LINGER_SECONDS = 5.0
_POLL_SECONDS = 0.1
_RETRY_SECONDS = 0.3
_TROUBLES = (
    BadMessage,
    ConnectionError,
    KeyError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)


@dataclass(frozen=True)
class Terms:
    """What node 0 says of a world that forms: the ports it serves, the run, a name for it."""

    port: int
    tether: int
    run: Run
    world: str


class Meeting(Rounds):
    """The rounds of launchers on several machines."""

    def __init__(self, settings: Settings, hooks: RunHooks) -> None:
        self.settings, self._hooks = settings, hooks
        self.patience = settings.node_timeout + heartbeats.beat_seconds(settings.node_timeout)
        self.door = Gathering(settings, hooks)
        self.mailbox = Mailbox(hooks.write, hooks.keep_log, hooks.notice)
        self._line_patience = heartbeats.line_patience(settings.node_timeout)
        self._prepared: RendezvousInfo | None = None
        self._server: ServedStore | None = None
        self._server_before: ServedStore | None = None
        self._served_at: tuple[str, int] | None = None
        self._tether_gate: Gate | None = None
        self._made: Run | None = None
        self._watch: RoundWatch | None = None
        self._presence: Presence | None = None
        self._left_before: dict[str, str] = {}
        self._agents_store: GuardedStore | None = None
        self._tethers: Tethers | None = None
        self._tether: Tether | None = None

    @property
    def run(self) -> Run | None:
        """The run that all launchers work on; ``None`` before they have met."""
        return self.door.run

    @property
    def round(self) -> int:
        """The number of the world, counted over all that the run has had; -1 before the first."""
        return self.door.round

    @property
    def node(self) -> int:
        """The place of this launcher in the world; -1 before it has one."""
        return self.door.node

    @property
    def host(self) -> str:
        """The name of this machine."""
        return self.door.host

    # ------------------------------------------------------------- what the agent asks

    def open(self) -> list[str]:
        """Meet for the first time, so that the run is known before ranks are started."""
        self._prepared = self._meet()
        return self.nodes

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet; the world that forms, and the store of its round."""
        prepared, self._prepared = self._prepared, None
        return prepared or self._meet()

    @property
    def nodes(self) -> list[str]:
        """The host names of the current round, by node rank."""
        return [] if self.door.world is None else self.door.world.hosts

    def num_nodes_waiting(self) -> int:
        """How many machines ask to be let in."""
        return 0 if self._watch is None else self._watch.waiting

    def lost(self) -> str | None:
        """Why the current round cannot go on."""
        if self._watch is None or self._presence is None:
            return None
        self.door.closed = self.door.closed or self._watch.closed or self._presence.closed
        return self.door.closed or self._watch.lost or self._presence.lost

    def post(self, event: Event) -> None:
        """Have an event written, by this launcher or by that of node 0."""
        # Where the store is lost, every launcher comes to this by itself; it is told once.
        once = isinstance(event, Restarting)
        identity = f"restart after round {self.door.round}" if once else None
        self.mailbox.post(event, is_main=self.door.node == 0, identity=identity)

    def leave(self, reason: str) -> None:
        """Leave for good."""
        if self.door.node == 0 and self.door.world is not None and len(self.door.world.members) > 1:
            self._linger(reason)
        self._close(reason)

    def close_for_all(self, reason: str) -> None:
        """The run is over everywhere."""
        self.door.closed = self.door.closed or reason
        if self._watch is not None:
            self._watch.say(heartbeats.OVER, encode({"closed": reason, "by": self.door.host}))
        if self._presence is not None:
            self._presence.close(reason)
        elif (book := self.door.places.look()) is not None:
            try:
                book.close(reason)
            except (ConnectionError, KeyError):
                return
            finally:
                book.line.close()

    def stop_waiting(self) -> None:
        """End a rendezvous that waits, and let the others know that we will not be in the next."""
        self.door.stopping = True
        if self._watch is not None:
            key = f"{heartbeats.LEFT}{self.door.node}"
            say = self._watch.say
            # In a thread: this is called where signals are handled, and must return.
            threading.Thread(target=say, args=(key, "preempted"), daemon=True).start()

    def get_backend(self) -> str:
        """A name for the agent's records."""
        return "c10d"

    def get_run_id(self) -> str:
        """What tells this run from every other."""
        return "paceline" if self.door.run is None else self.door.run.identity

    def is_closed(self) -> bool:
        """Whether the run is over."""
        self.lost()
        return self.door.closed is not None

    def set_closed(self) -> None:
        """The run is over."""
        self.close_for_all(f"ended by {self.door.host}")

    def shutdown(self) -> bool:
        """Let go of everything; the others have a moment to take what they need from our store."""
        if self.door.node == 0 or self.door.places.serves:
            self._linger("ended")
        self._close("ended")
        return True

    # ------------------------------------------------------------- meeting

    def _meet(self) -> RendezvousInfo:
        expected = self._end_round(heartbeats.REFORMS)
        self.door.begin_to_wait()
        problem: BaseException | None = None
        while True:
            book: Book | None = None
            try:
                book = self.door.find()
                return self._form(book, self.door.join(book, expected))
            except StartOver as error:
                problem = problem or error
            except _TROUBLES as error:
                problem = error
            except BaseException:
                self._hang_up(book)
                raise
            self._hang_up(book)
            if time.monotonic() > self.door.deadline:
                raise RendezvousTimeoutError(self.door.in_vain(problem))
            time.sleep(_RETRY_SECONDS)

    # ------------------------------------------------------------- forming a world

    def _form(self, book: Book, place: tuple[int, int, int]) -> RendezvousInfo:
        generation, number, size = place
        try:
            return self._form_together(book, generation, number, size)
        except BaseException as error:
            self._end_round(heartbeats.REFORMS)
            self._give_up_generation(book, generation, error)
            raise

    def _give_up_generation(self, book: Book, generation: int, error: BaseException) -> None:
        """The others are not to wait for us, nor to come here again."""
        try:
            misfit = isinstance(error, NotTheSameRun)
            if isinstance(error, ConfigError) and not misfit and self.door.round < 0:
                book.close(f"{self.door.host}: {error}")
            book.open_next(generation, 0)
        except (ConnectionError, KeyError):
            return

    def _form_together(self, book: Book, generation: int, number: int, size: int) -> RendezvousInfo:
        asks = self.door.asks_for(book, generation, joining=False)
        own = self.door.as_member(book.arrive(), book.line)
        book.put(f"member/{generation}/{number}", own.to_json())
        texts = [self.door.wait_for(book, f"member/{generation}/{i}", asks) for i in range(size)]
        world = agree([Member.from_json(text) for text in texts])
        if own.asked != world.members[0].asked:
            raise NotTheSameRun(different(own, world.members[0]))
        node = [member.id for member in world.members].index(self.door.id)
        address = world.members[0].address
        if node == 0:
            run = world.run or self._made or self._hooks.make()
            self._made = run  # where this world does not come about, the next one takes it
            if world.run is not None and self.door.run != world.run:
                self._hooks.take(run)
            terms = self._serve_round(address, size, run)
            book.put(f"terms/{generation}", encode(terms))
        else:
            terms = decode(Terms, self.door.wait_for(book, f"terms/{generation}", asks))
            run = terms.run
            if run != self.door.run:
                self._hooks.take(run)
        self._served_at = (address, terms.port)
        line = self._line_to_round(self._served_at)
        if node != 0:
            with contextlib.suppress(OSError):  # a help, not a need
                where = self._from_here(address, terms.tether)
                self._tether = Tether(*where, node, self._line_patience)
        try:
            self._meet_in_round(line, node, size, asks)
        except BaseException:
            line.close()
            raise
        world = dataclasses.replace(world, run=run)
        return self._begin(book, generation, world, node, terms, line)

    def _serve_round(self, address: str, size: int, run: Run) -> Terms:
        """Serve the store of the round, and the other ends of tethers, to the others."""
        tunnel = self.door.tunnel
        self._server = ServedStore(address, 0, tunnel)
        heartbeats.prepare(self._server.store, size)
        if tunnel is None:
            self._tethers = Tethers(listen(address, 0), size, self._hooks.notice)
            port = self._tethers.port
        else:
            self._tethers = Tethers(tunnel.locked_listener(), size, self._hooks.notice)
            self._tether_gate = tunnel.expose(listen(address, 0), self._tethers.port)
            port = self._tether_gate.port
        return Terms(self._server.port, port, run, uuid.uuid4().hex)

    def _line_to_round(self, where: tuple[str, int]) -> Line:
        return Line(*where, self._line_patience, self.door.tunnel)

    def _from_here(self, address: str, port: int) -> tuple[str, int]:
        """Where processes of this machine get to what node 0 serves there."""
        tunnel = self.door.tunnel
        return (address, port) if tunnel is None else tunnel.reach(address, port)

    def _meet_in_round(self, line: Line, node: int, size: int, asks: Callable[[], None]) -> None:
        """Nobody is in before all are: whoever cannot reach the round's store is found out here."""
        line.call(lambda store: store.set(f"here/{node}", "here"))
        keys = [f"here/{other}" for other in range(size)]
        self.door.wait_until(
            lambda: line.call(lambda store: store.check(keys)),
            "all nodes to reach the store of the round",
            asks,
        )

    def _begin(
        self,
        book: Book,
        generation: int,
        world: World,
        node: int,
        terms: Terms,
        line: Line,
    ) -> RendezvousInfo:
        run, first = world.run, world.members[0]
        assert run is not None
        current = Current(
            world=terms.world,
            generation=generation,
            round=world.round,
            hosts=world.hosts,
            asked=dict(self.settings.asked),
            run=run,
        )
        left_before = self._left_before
        self.door.world, self.door.world_id = world, current.world
        self.door.run, self.door.round, self.door.node = run, world.round, node
        self.mailbox.new_round(world.hosts, node)
        if node == 0:
            book.write_current(current)
            self.mailbox.write_pending()
            self._tell_changes(world, left_before)
        watch = self._watch = RoundWatch(
            lambda: self._line_to_round((first.address, terms.port)),
            line,
            node=node,
            hosts=world.hosts,
            timeout=self.settings.node_timeout,
            mailbox=self.mailbox,
            tethers=self._tethers,
            notice=self._hooks.notice,
        )
        self._presence = Presence(
            self.door.places,
            book,
            current,
            is_main=node == 0,
            has_room=len(world.members) < self.settings.most,
            timeout=self.settings.node_timeout,
            tell_waiting=lambda count: watch.say(heartbeats.WAITING, str(count)),
            notice=self._hooks.notice,
        )
        self._agents_store = GuardedStore(
            self._line_to_round((first.address, terms.port)),
            lambda: None,
            self.settings.node_timeout,
            prefix="agent",
        )
        return RendezvousInfo(
            self._agents_store,
            node,
            len(world.members),
            RendezvousStoreInfo(*self._from_here(first.address, terms.port)),
        )

    def _tell_changes(self, world: World, left_before: Mapping[str, str]) -> None:
        for identity, host in gone(world).items():
            reason = left_before.get(identity, "")
            known = reason in ("preempted", "ended")
            self._hooks.write(NodeLeft(host=host, reason=reason if known else "lost"))
        for host in joined(world):
            self._hooks.write(NodeJoined(host=host))

    # ------------------------------------------------------------- ending a round

    def _end_round(self, reason: str) -> int:
        """Say that we are done with the round; how many of it will meet again, we included."""
        watch, presence, world = self._watch, self._presence, self.door.world
        self._watch = self._presence = None
        expected = 0
        if watch is not None and world is not None:
            watch.stop(reason)
            expected = watch.alive() + watch.waiting
            self._left_before = {world.members[i].id: why for i, why in watch.left.items()}
        if presence is not None:
            presence.stop()
        for held in (self._agents_store, self._tether, self._tether_gate, self._tethers):
            if held is not None:
                held.close()
        self._tether = self._tethers = self._tether_gate = None
        # The others may not have heard yet why the round is over: its store stays for one more.
        self._close_server_before()
        self._server_before, self._server = self._server, None
        if self.door.tunnel is not None and self._served_at is not None:
            self.door.tunnel.forget(*self._served_at)
        self._agents_store = self._served_at = None
        return expected

    def _close_server_before(self) -> None:
        if self._server_before is not None:
            self._server_before.close()
        self._server_before = None

    def _close(self, reason: str) -> None:
        self._end_round(reason)
        self._close_server_before()
        self.door.places.stop_serving()
        if self.door.tunnel is not None:
            self.door.tunnel.close()

    def _linger(self, reason: str) -> None:
        """Keep serving until the others are done with the round, or a moment has passed."""
        watch = self._watch
        if watch is None:
            return
        watch.say(f"{heartbeats.LEFT}{self.door.node}", reason)
        deadline = time.monotonic() + _LINGER_SECONDS
        while time.monotonic() < deadline and not watch.others_are_gone():
            time.sleep(_POLL_SECONDS)

    def _hang_up(self, book: Book | None) -> None:
        if book is not None and self._presence is None:
            book.line.close()
