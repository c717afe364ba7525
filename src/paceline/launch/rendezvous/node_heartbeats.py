"""Heartbeats between the launchers of a world, through the store of its round.

The launcher of node 0 serves the round's store, so that an outage of the rendezvous store does not
matter to a running world. Heartbeats are counters, not times: clocks need not agree.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.launch.background_errors import BackgroundErrors, to_stderr
from paceline.launch.messages import decode, decode_number, decode_text
from paceline.launch.rendezvous.forwarding import EventForwarder
from paceline.launch.rendezvous.keepalive import KeepAliveServer

if TYPE_CHECKING:
    from paceline.launch.rendezvous.stores import StoreConnection

Store = Any  # torch's, which is not imported here
OVER = "over"
WAITING = "waiting"
LEFT = "left/"
REFORMS = "reforms"
"""Why a node leaves a round when it will be in the next one."""
_ALIVE = "alive/"
_BEATS_AFTER_DISCONNECT = 2.5


def beat_seconds(node_timeout: float) -> float:
    """Seconds between heartbeats: several fit into the timeout."""
    return min(1.0, node_timeout / 5)


def call_timeout(node_timeout: float) -> float:
    """How long one call to a store may take, so that a second try fits into the node timeout."""
    return max(0.3, min(2.0, node_timeout / 5))


class HeartbeatTracker:
    """Which nodes have sent no heartbeat for too long. Pure: it is given counts and times."""

    def __init__(self, nodes: int, own: int, timeout: float, now: float) -> None:
        self._own, self._timeout = own, timeout
        self._short = min(timeout, _BEATS_AFTER_DISCONNECT * beat_seconds(timeout))
        self._disconnected_nodes: set[int] = set()
        self._counts = [-1] * nodes
        self._moved = [now] * nodes

    def note(self, counts: Sequence[int], now: float) -> None:
        """The nodes have these counts now."""
        for node, count in enumerate(counts):
            if count != self._counts[node]:
                self._counts[node] = count
                self._moved[node] = now

    def note_disconnected(self, nodes: Iterable[int]) -> None:
        """The keep-alive connections of these nodes broke: give them a shorter timeout."""
        self._disconnected_nodes.update(nodes)

    def silent(self, now: float) -> list[int]:
        """Nodes other than ours that sent no heartbeat within the timeout."""
        return [
            node
            for node, moved in enumerate(self._moved)
            if node != self._own
            and now - moved > (self._short if node in self._disconnected_nodes else self._timeout)
        ]


@dataclass(frozen=True)
class RoundSnapshot:
    """What the store of a round held when it was last read."""

    counts: list[int]
    left: dict[int, str]
    over: dict[str, str]
    waiting: int


def prepare_store(store: Store, nodes: int) -> None:
    """Create the keys that are read with every heartbeat, so that no read waits for one."""
    store.set(OVER, "")
    store.set(WAITING, "0")
    for node in range(nodes):
        store.set(f"{_ALIVE}{node}", "0")
        store.set(f"{LEFT}{node}", "")


def beat_and_read(store: Store, node: int, nodes: int) -> RoundSnapshot:
    """Send a heartbeat, and read those of the others."""
    store.add(f"{_ALIVE}{node}", 1)
    keys = [f"{_ALIVE}{i}" for i in range(nodes)] + [f"{LEFT}{i}" for i in range(nodes)]
    *rest, over, waiting = map(bytes, store.multi_get([*keys, OVER, WAITING]))
    left = {i: decode_text(why) for i, why in enumerate(rest[nodes:]) if why}
    return RoundSnapshot(
        [decode_number(count) for count in rest[:nodes]],
        left,
        decode(dict[str, str], over) if over else {},
        decode_number(waiting),
    )


class HeartbeatMonitor:
    """A thread that sends this node's heartbeats and notices which other nodes are gone."""

    def __init__(
        self,
        connect: Callable[[], StoreConnection],
        connection: StoreConnection,
        *,
        node: int,
        hosts: Sequence[str],
        timeout: float,
        forwarder: EventForwarder,
        keepalive_server: KeepAliveServer | None = None,
        notice: Callable[[str], None] = to_stderr,
    ) -> None:
        self._connect, self._connection = connect, connection
        self._node, self._hosts, self._timeout = node, list(hosts), timeout
        self._forwarder, self._keepalive_server = forwarder, keepalive_server
        self._errors = BackgroundErrors("the watch over the nodes", notice)
        self._beats = HeartbeatTracker(len(hosts), node, timeout, time.monotonic())
        self._reached = time.monotonic()
        self._stop = threading.Event()
        self._seen: RoundSnapshot | None = None
        self.lost: str | None = None
        self.closed: str | None = None
        self._thread = threading.Thread(target=self._watch, name="paceline-heartbeats", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many nodes wait to join."""
        return 0 if self._seen is None else self._seen.waiting

    @property
    def left(self) -> dict[int, str]:
        """Nodes that announced that they leave, and why."""
        return {} if self._seen is None else dict(self._seen.left)

    def alive(self) -> int:
        """How many nodes of the round may be expected to form the next one, ours included."""
        left = [node for node, why in self.left.items() if why != REFORMS]
        silent = set(self._beats.silent(time.monotonic())) - self.left.keys()
        gone = {*silent, *left}
        if self.lost is not None and self._node != 0 and self._disconnected:
            gone.add(0)
        return len(self._hosts) - len(gone - {self._node})

    def others_are_gone(self) -> bool:
        """Whether every other node has announced that it is done with the round."""
        return len({*self.left} - {self._node}) >= len(self._hosts) - 1

    def publish(self, key: str, value: str) -> None:
        """Set a key of the round's store; a store that is gone has no readers either."""
        try:
            self._connection.call(lambda store: store.set(key, value))
        except (ConnectionError, KeyError):
            return

    def stop(self, reason: str) -> None:
        """Announce why this node is done with the round, after a last exchange of events."""
        self._stop.set()
        # A thread that waits for an answer over a dead link is left to itself.
        self._thread.join(0.0 if self.lost and not self.closed else self._timeout)
        if not self._disconnected:
            self.publish(f"{LEFT}{self._node}", reason)
        self._connection.close()

    _disconnected = False

    def _watch(self) -> None:
        beat = beat_seconds(self._timeout)
        while True:
            last = self._stop.wait(beat)
            with self._errors.reported():
                self._once()
            if last:
                return

    def _once(self) -> None:
        try:
            self._connection = self._connection if not self._disconnected else self._connect()
            self._disconnected = False
            nodes = len(self._hosts)
            seen = self._connection.call(lambda store: beat_and_read(store, self._node, nodes))
            with self._errors.reported("exchanging events", but=(ConnectionError, KeyError)):
                self._forwarder.exchange(self._connection, is_main=self._node == 0)
        except (ConnectionError, KeyError) as error:
            self._disconnected = True
            self._note_disconnected(error)
            return
        now = time.monotonic()
        self._reached = now
        self._seen = seen
        self._beats.note(seen.counts, now)
        if self._keepalive_server is not None:
            self._beats.note_disconnected(self._keepalive_server.disconnected - seen.left.keys())
        if "closed" in seen.over:
            self.closed = seen.over["closed"]
            self.lost = self.lost or self.closed
        elif silent := self._beats.silent(now):
            self.lost = self.lost or self._silence(silent)

    def _note_disconnected(self, error: Exception) -> None:
        from paceline.launch.rendezvous.stores import StoreRefused

        if self._stop.is_set():
            return
        if isinstance(error, StoreRefused):
            self.lost = self.lost or (
                f"the launcher of node 0 ({self._hosts[0]}), which serves the round, is gone"
            )
        elif time.monotonic() - self._reached > self._timeout:
            self.lost = self.lost or (
                f"node 0 ({self._hosts[0]}) could not be reached for {self._timeout:g} s"
            )

    def _silence(self, silent: Sequence[int]) -> str:
        names = ", ".join(f"node {node} ({self._hosts[node]})" for node in silent)
        if self._keepalive_server is not None and self._keepalive_server.disconnected.issuperset(
            silent
        ):
            return f"the launcher of {names} is gone"
        verb = "has" if len(silent) == 1 else "have"
        return f"{names} {verb} given no sign of life for {self._timeout:g} s"
