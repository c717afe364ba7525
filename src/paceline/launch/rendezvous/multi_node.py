"""The rendezvous of launchers on several machines. Each world they form is a round.

Torch's dynamic rendezvous on a c10d store decides who is part of a world. We add what it lacks:
every generation is a rendezvous of its own (``records.py``), every call over the network ends in
time (``stores.py``), the members exchange what they run and what they know (``membership.py``), the
launcher of node 0 serves the store of the round, and all send heartbeats (``node_heartbeats.py``).

The timeouts follow from the config. A machine that stops or is cut off is lost after
``launch.node_timeout``. A world forms as soon as all expected machines are there, at the latest
``launch.node_timeout`` after the minimum is, or ``LAST_CALL_SECONDS`` (``joining.py``) where nobody
knows who else comes; a launcher waits for that up to ``launch.rejoin_timeout``.

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
from paceline.launch.rendezvous import node_heartbeats
from paceline.launch.rendezvous.announcing import WorldAnnouncer
from paceline.launch.rendezvous.forwarding import EventForwarder
from paceline.launch.rendezvous.handler import LauncherRendezvous
from paceline.launch.rendezvous.joining import (
    Joiner,
    NotTheSameRun,
    RendezvousSettings,
    RunHooks,
    StartOver,
)
from paceline.launch.rendezvous.keepalive import KeepAliveConnection, KeepAliveServer
from paceline.launch.rendezvous.membership import (
    Membership,
    NodeMember,
    RunInfo,
    agree,
    different,
    gone,
    joined,
)
from paceline.launch.rendezvous.node_heartbeats import HeartbeatMonitor
from paceline.launch.rendezvous.records import CurrentWorld, RendezvousRecords
from paceline.launch.rendezvous.stores import InterruptibleStore, ServedStore, StoreConnection
from paceline.launch.tunnel import ExposedPort

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
    """What node 0 announces of a world that forms: the ports it serves, the run, an id."""

    store_port: int
    keepalive_port: int
    run: RunInfo
    world: str


class MultiNodeRendezvous(LauncherRendezvous):
    """The rendezvous of launchers on several machines."""

    def __init__(self, settings: RendezvousSettings, hooks: RunHooks) -> None:
        self.settings, self._hooks = settings, hooks
        self.patience = settings.node_timeout + node_heartbeats.beat_seconds(settings.node_timeout)
        self.joiner = Joiner(settings, hooks)
        self.forwarder = EventForwarder(hooks.write, hooks.keep_log, hooks.notice)
        self._call_timeout = node_heartbeats.call_timeout(settings.node_timeout)
        self._prepared: RendezvousInfo | None = None
        self._server: ServedStore | None = None
        self._server_before: ServedStore | None = None
        self._served_at: tuple[str, int] | None = None
        self._keepalive_port: ExposedPort | None = None
        self._made: RunInfo | None = None
        self._watch: HeartbeatMonitor | None = None
        self._announcer: WorldAnnouncer | None = None
        self._left_before: dict[str, str] = {}
        self._agents_store: InterruptibleStore | None = None
        self._keepalive_server: KeepAliveServer | None = None
        self._keepalive: KeepAliveConnection | None = None

    @property
    def run(self) -> RunInfo | None:
        """The run that all launchers work on; ``None`` before the first round."""
        return self.joiner.run

    @property
    def round(self) -> int:
        """The number of the world, counted over all that the run has had; -1 before the first."""
        return self.joiner.round

    @property
    def node(self) -> int:
        """The node rank of this launcher; -1 before it has one."""
        return self.joiner.node

    @property
    def host(self) -> str:
        """The name of this machine."""
        return self.joiner.host

    # ------------------------------------------------------------- called by the agent

    def open(self) -> list[str]:
        """Form the first world already, so that the run is known before ranks are started."""
        self._prepared = self._rendezvous()
        return self.nodes

    def next_rendezvous(self) -> RendezvousInfo:
        """Form the next world; returns it with the store of its round."""
        prepared, self._prepared = self._prepared, None
        return prepared or self._rendezvous()

    @property
    def nodes(self) -> list[str]:
        """The host names of the current round, by node rank."""
        return [] if self.joiner.world is None else self.joiner.world.hosts

    def num_nodes_waiting(self) -> int:
        """How many nodes wait to join."""
        return 0 if self._watch is None else self._watch.waiting

    def lost(self) -> str | None:
        """Why the current round cannot go on."""
        if self._watch is None or self._announcer is None:
            return None
        self.joiner.closed = self.joiner.closed or self._watch.closed or self._announcer.closed
        return self.joiner.closed or self._watch.lost or self._announcer.lost

    def post(self, event: Event) -> None:
        """Have an event written, by this launcher or by that of node 0."""
        # Where the store is lost, every launcher comes to this by itself; it is written once.
        once = isinstance(event, Restarting)
        identity = f"restart after round {self.joiner.round}" if once else None
        self.forwarder.post(event, is_main=self.joiner.node == 0, identity=identity)

    def leave(self, reason: str) -> None:
        """Leave for good."""
        if (
            self.joiner.node == 0
            and self.joiner.world is not None
            and len(self.joiner.world.members) > 1
        ):
            self._linger(reason)
        self._close(reason)

    def close_for_all(self, reason: str) -> None:
        """The run is over everywhere."""
        self.joiner.closed = self.joiner.closed or reason
        if self._watch is not None:
            self._watch.publish(
                node_heartbeats.OVER, encode({"closed": reason, "by": self.joiner.host})
            )
        if self._announcer is not None:
            self._announcer.close(reason)
        elif (records := self.joiner.endpoints.look()) is not None:
            try:
                records.close(reason)
            except (ConnectionError, KeyError):
                return
            finally:
                records.connection.close()

    def stop_waiting(self) -> None:
        """End a rendezvous that waits, and let the others know that we will not be in the next."""
        self.joiner.stopping = True
        if self._watch is not None:
            key = f"{node_heartbeats.LEFT}{self.joiner.node}"
            publish = self._watch.publish
            # In a thread: this is called where signals are handled, and must return.
            threading.Thread(target=publish, args=(key, "preempted"), daemon=True).start()

    def get_backend(self) -> str:
        """A name for the agent's records."""
        return "c10d"

    def get_run_id(self) -> str:
        """A unique id of the run."""
        return "paceline" if self.joiner.run is None else self.joiner.run.identity

    def is_closed(self) -> bool:
        """Whether the run is over."""
        self.lost()
        return self.joiner.closed is not None

    def set_closed(self) -> None:
        """The run is over."""
        self.close_for_all(f"ended by {self.joiner.host}")

    def shutdown(self) -> bool:
        """Close everything; the others get a moment to read what they need from our store."""
        if self.joiner.node == 0 or self.joiner.endpoints.serves:
            self._linger("ended")
        self._close("ended")
        return True

    # ------------------------------------------------------------- joining

    def _rendezvous(self) -> RendezvousInfo:
        expected = self._end_round(node_heartbeats.REFORMS)
        self.joiner.begin_to_wait()
        problem: BaseException | None = None
        while True:
            records: RendezvousRecords | None = None
            try:
                records = self.joiner.find()
                return self._form(records, self.joiner.join(records, expected))
            except StartOver as error:
                problem = problem or error
            except _TROUBLES as error:
                problem = error
            except BaseException:
                self._disconnect(records)
                raise
            self._disconnect(records)
            if time.monotonic() > self.joiner.deadline:
                raise RendezvousTimeoutError(self.joiner.why_none_formed(problem))
            time.sleep(_RETRY_SECONDS)

    # ------------------------------------------------------------- forming a world

    def _form(self, records: RendezvousRecords, place: tuple[int, int, int]) -> RendezvousInfo:
        generation, number, size = place
        try:
            return self._form_together(records, generation, number, size)
        except BaseException as error:
            self._end_round(node_heartbeats.REFORMS)
            self._give_up_generation(records, generation, error)
            raise

    def _give_up_generation(
        self, records: RendezvousRecords, generation: int, error: BaseException
    ) -> None:
        """Open the next generation, so that the others neither wait for us nor come back here."""
        try:
            misfit = isinstance(error, NotTheSameRun)
            if isinstance(error, ConfigError) and not misfit and self.joiner.round < 0:
                records.close(f"{self.joiner.host}: {error}")
            records.open_next(generation, 0)
        except (ConnectionError, KeyError):
            return

    def _form_together(
        self, records: RendezvousRecords, generation: int, number: int, size: int
    ) -> RendezvousInfo:
        pause = self.joiner.pause_in(records, generation, joining=False)
        own = self.joiner.as_member(records.arrive(), records.connection)
        records.put(f"member/{generation}/{number}", own.to_json())
        texts = [
            self.joiner.wait_for(records, f"member/{generation}/{i}", pause) for i in range(size)
        ]
        world = agree([NodeMember.from_json(text) for text in texts])
        if own.asked != world.members[0].asked:
            raise NotTheSameRun(different(own, world.members[0]))
        node = [member.id for member in world.members].index(self.joiner.id)
        address = world.members[0].address
        if node == 0:
            run = world.run or self._made or self._hooks.make()
            self._made = run  # where this world does not come about, the next one takes it
            if world.run is not None and self.joiner.run != world.run:
                self._hooks.take(run)
            terms = self._serve_round(address, size, run)
            records.put(f"terms/{generation}", encode(terms))
        else:
            terms = decode(Terms, self.joiner.wait_for(records, f"terms/{generation}", pause))
            run = terms.run
            if run != self.joiner.run:
                self._hooks.take(run)
        self._served_at = (address, terms.store_port)
        connection = self._connect_to_round(self._served_at)
        if node != 0:
            with contextlib.suppress(OSError):  # helpful, but not required
                where = self._from_here(address, terms.keepalive_port)
                self._keepalive = KeepAliveConnection(*where, node, self._call_timeout)
        try:
            self._wait_for_all_in_round(connection, node, size, pause)
        except BaseException:
            connection.close()
            raise
        world = dataclasses.replace(world, run=run)
        return self._begin(records, generation, world, node, terms, connection)

    def _serve_round(self, address: str, size: int, run: RunInfo) -> Terms:
        """Serve the store of the round, and accept keep-alive connections, for the others."""
        tunnel = self.joiner.tunnel
        self._server = ServedStore(address, 0, tunnel)
        node_heartbeats.prepare_store(self._server.store, size)
        if tunnel is None:
            self._keepalive_server = KeepAliveServer(listen(address, 0), size, self._hooks.notice)
            port = self._keepalive_server.port
        else:
            self._keepalive_server = KeepAliveServer(
                tunnel.locked_listener(), size, self._hooks.notice
            )
            self._keepalive_port = tunnel.expose(listen(address, 0), self._keepalive_server.port)
            port = self._keepalive_port.port
        return Terms(self._server.port, port, run, uuid.uuid4().hex)

    def _connect_to_round(self, where: tuple[str, int]) -> StoreConnection:
        return StoreConnection(*where, self._call_timeout, self.joiner.tunnel)

    def _from_here(self, address: str, port: int) -> tuple[str, int]:
        """The address at which processes of this machine reach what node 0 serves there."""
        tunnel = self.joiner.tunnel
        return (address, port) if tunnel is None else tunnel.reach(address, port)

    def _wait_for_all_in_round(
        self, connection: StoreConnection, node: int, size: int, pause: Callable[[], None]
    ) -> None:
        """Wait until all nodes have reached the round's store, to find out here who cannot."""
        connection.call(lambda store: store.set(f"here/{node}", "here"))
        keys = [f"here/{other}" for other in range(size)]
        self.joiner.wait_until(
            lambda: connection.call(lambda store: store.check(keys)),
            "all nodes to reach the store of the round",
            pause,
        )

    def _begin(
        self,
        records: RendezvousRecords,
        generation: int,
        world: Membership,
        node: int,
        terms: Terms,
        connection: StoreConnection,
    ) -> RendezvousInfo:
        run, first = world.run, world.members[0]
        assert run is not None
        current = CurrentWorld(
            world=terms.world,
            generation=generation,
            round=world.round,
            hosts=world.hosts,
            asked=dict(self.settings.asked),
            run=run,
        )
        left_before = self._left_before
        self.joiner.world, self.joiner.world_id = world, current.world
        self.joiner.run, self.joiner.round, self.joiner.node = run, world.round, node
        self.forwarder.new_round(world.hosts, node)
        if node == 0:
            records.write_current(current)
            self.forwarder.write_pending()
            self._write_changes(world, left_before)
        watch = self._watch = HeartbeatMonitor(
            lambda: self._connect_to_round((first.address, terms.store_port)),
            connection,
            node=node,
            hosts=world.hosts,
            timeout=self.settings.node_timeout,
            forwarder=self.forwarder,
            keepalive_server=self._keepalive_server,
            notice=self._hooks.notice,
        )
        self._announcer = WorldAnnouncer(
            self.joiner.endpoints,
            records,
            current,
            is_main=node == 0,
            has_room=len(world.members) < self.settings.max_nodes,
            timeout=self.settings.node_timeout,
            report_waiting=lambda count: watch.publish(node_heartbeats.WAITING, str(count)),
            notice=self._hooks.notice,
        )
        self._agents_store = InterruptibleStore(
            self._connect_to_round((first.address, terms.store_port)),
            lambda: None,
            self.settings.node_timeout,
            prefix="agent",
        )
        return RendezvousInfo(
            self._agents_store,
            node,
            len(world.members),
            RendezvousStoreInfo(*self._from_here(first.address, terms.store_port)),
        )

    def _write_changes(self, world: Membership, left_before: Mapping[str, str]) -> None:
        for identity, host in gone(world).items():
            reason = left_before.get(identity, "")
            known = reason in ("preempted", "ended")
            self._hooks.write(NodeLeft(host=host, reason=reason if known else "lost"))
        for host in joined(world):
            self._hooks.write(NodeJoined(host=host))

    # ------------------------------------------------------------- ending a round

    def _end_round(self, reason: str) -> int:
        """Leave the round; returns how many of its nodes will form the next one, ours included."""
        watch, announcer, world = self._watch, self._announcer, self.joiner.world
        self._watch = self._announcer = None
        expected = 0
        if watch is not None and world is not None:
            watch.stop(reason)
            expected = watch.alive() + watch.waiting
            self._left_before = {world.members[i].id: why for i, why in watch.left.items()}
        if announcer is not None:
            announcer.stop()
        for held in (
            self._agents_store,
            self._keepalive,
            self._keepalive_port,
            self._keepalive_server,
        ):
            if held is not None:
                held.close()
        self._keepalive = self._keepalive_server = self._keepalive_port = None
        # The others may not have read yet why the round is over: keep its store for one more round.
        self._close_server_before()
        self._server_before, self._server = self._server, None
        if self.joiner.tunnel is not None and self._served_at is not None:
            self.joiner.tunnel.forget(*self._served_at)
        self._agents_store = self._served_at = None
        return expected

    def _close_server_before(self) -> None:
        if self._server_before is not None:
            self._server_before.close()
        self._server_before = None

    def _close(self, reason: str) -> None:
        self._end_round(reason)
        self._close_server_before()
        self.joiner.endpoints.stop_serving()
        if self.joiner.tunnel is not None:
            self.joiner.tunnel.close()

    def _linger(self, reason: str) -> None:
        """Keep serving until the others are done with the round, or a moment has passed."""
        watch = self._watch
        if watch is None:
            return
        watch.publish(f"{node_heartbeats.LEFT}{self.joiner.node}", reason)
        deadline = time.monotonic() + _LINGER_SECONDS
        while time.monotonic() < deadline and not watch.others_are_gone():
            time.sleep(_POLL_SECONDS)

    def _disconnect(self, records: RendezvousRecords | None) -> None:
        if records is not None and self._announcer is None:
            records.connection.close()
