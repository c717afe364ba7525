"""Who of a world still lives: every launcher counts a beat up in the round's store, and looks.

The round's store is served by the launcher of node 0, so that an outage of the meeting place does
not matter to a world that runs. Beats are counters, not times: clocks need not agree.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.launch.endurance import Endurance, to_stderr
from paceline.launch.messages import decode, decode_number, decode_text
from paceline.launch.rendezvous.forwarding import Mailbox
from paceline.launch.rendezvous.keepalive import Tethers

if TYPE_CHECKING:
    from paceline.launch.rendezvous.stores import Line

Store = Any  # torch's, which is not imported here
OVER = "over"
WAITING = "waiting"
LEFT = "left/"
REFORMS = "reforms"
"""Why a node is done with a round that will be in the next one."""
_ALIVE = "alive/"
_BEATS_AFTER_HANG_UP = 2.5


def beat_seconds(node_timeout: float) -> float:
    """How often a sign of life is given: several times within the time that it may stay away."""
    return min(1.0, node_timeout / 5)


def line_patience(node_timeout: float) -> float:
    """How long one answer may take, so that a second try fits into the time a node has."""
    return max(0.3, min(2.0, node_timeout / 5))


class Beats:
    """Which nodes have been silent for too long. Pure: it is told counts and times."""

    def __init__(self, nodes: int, own: int, timeout: float, now: float) -> None:
        self._own, self._timeout = own, timeout
        self._short = min(timeout, _BEATS_AFTER_HANG_UP * beat_seconds(timeout))
        self._hung_up: set[int] = set()
        self._counts = [-1] * nodes
        self._moved = [now] * nodes

    def note(self, counts: Sequence[int], now: float) -> None:
        """The nodes have these counts now."""
        for node, count in enumerate(counts):
            if count != self._counts[node]:
                self._counts[node] = count
                self._moved[node] = now

    def hang_up(self, nodes: Iterable[int]) -> None:
        """The connections to these broke: if they are silent as well, it is not for long."""
        self._hung_up.update(nodes)

    def silent(self, now: float) -> list[int]:
        """Nodes other than ours that gave no sign of life for the timeout."""
        return [
            node
            for node, moved in enumerate(self._moved)
            if node != self._own
            and now - moved > (self._short if node in self._hung_up else self._timeout)
        ]


@dataclass(frozen=True)
class Seen:
    """What the store of a round said at one look."""

    counts: list[int]
    left: dict[int, str]
    over: dict[str, str]
    waiting: int


def prepare(store: Store, nodes: int) -> None:
    """Put into a fresh store what every look reads, so that none has to wait for a key."""
    store.set(OVER, "")
    store.set(WAITING, "0")
    for node in range(nodes):
        store.set(f"{_ALIVE}{node}", "0")
        store.set(f"{LEFT}{node}", "")


def look(store: Store, node: int, nodes: int) -> Seen:
    """Give a sign of life and look for those of the others."""
    store.add(f"{_ALIVE}{node}", 1)
    keys = [f"{_ALIVE}{i}" for i in range(nodes)] + [f"{LEFT}{i}" for i in range(nodes)]
    *rest, over, waiting = map(bytes, store.multi_get([*keys, OVER, WAITING]))
    left = {i: decode_text(why) for i, why in enumerate(rest[nodes:]) if why}
    return Seen(
        [decode_number(count) for count in rest[:nodes]],
        left,
        decode(dict[str, str], over) if over else {},
        decode_number(waiting),
    )


class RoundWatch:
    """A thread that keeps this node alive in a round and notices what becomes of the others."""

    def __init__(
        self,
        connect: Callable[[], Line],
        line: Line,
        *,
        node: int,
        hosts: Sequence[str],
        timeout: float,
        mailbox: Mailbox,
        tethers: Tethers | None = None,
        notice: Callable[[str], None] = to_stderr,
    ) -> None:
        self._connect, self._line = connect, line
        self._node, self._hosts, self._timeout = node, list(hosts), timeout
        self._mailbox, self._tethers = mailbox, tethers
        self._endurance = Endurance("the watch over the nodes", notice)
        self._beats = Beats(len(hosts), node, timeout, time.monotonic())
        self._reached = time.monotonic()
        self._stop = threading.Event()
        self._seen: Seen | None = None
        self.lost: str | None = None
        self.closed: str | None = None
        self._thread = threading.Thread(target=self._watch, name="paceline-liveness", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many nodes wait to be let in."""
        return 0 if self._seen is None else self._seen.waiting

    @property
    def left(self) -> dict[int, str]:
        """Nodes that said that they leave, and why."""
        return {} if self._seen is None else dict(self._seen.left)

    def alive(self) -> int:
        """How many nodes of the round may be expected to form the next one, ours included."""
        left = [node for node, why in self.left.items() if why != REFORMS]
        silent = set(self._beats.silent(time.monotonic())) - self.left.keys()
        gone = {*silent, *left}
        if self.lost is not None and self._node != 0 and self._line_is_lost:
            gone.add(0)
        return len(self._hosts) - len(gone - {self._node})

    def others_are_gone(self) -> bool:
        """Whether every other node has said that it is done with the round."""
        return len({*self.left} - {self._node}) >= len(self._hosts) - 1

    def say(self, key: str, value: str) -> None:
        """Set a key of the round's store; without it, nobody is there to read it."""
        try:
            self._line.call(lambda store: store.set(key, value))
        except (ConnectionError, KeyError):
            return

    def stop(self, reason: str) -> None:
        """Say why this node is done with the round, after a last exchange of news."""
        self._stop.set()
        # A thread that waits for an answer over a dead link is left to itself.
        self._thread.join(0.0 if self.lost and not self.closed else self._timeout)
        if not self._line_is_lost:
            self.say(f"{LEFT}{self._node}", reason)
        self._line.close()

    _line_is_lost = False

    def _watch(self) -> None:
        beat = beat_seconds(self._timeout)
        while True:
            last = self._stop.wait(beat)
            with self._endurance.turn():
                self._once()
            if last:
                return

    def _once(self) -> None:
        try:
            self._line = self._line if not self._line_is_lost else self._connect()
            self._line_is_lost = False
            nodes = len(self._hosts)
            seen = self._line.call(lambda store: look(store, self._node, nodes))
            with self._endurance.turn("exchanging news", but=(ConnectionError, KeyError)):
                self._mailbox.exchange(self._line, is_main=self._node == 0)
        except (ConnectionError, KeyError) as error:
            self._line_is_lost = True
            self._note_lost_line(error)
            return
        now = time.monotonic()
        self._reached = now
        self._seen = seen
        self._beats.note(seen.counts, now)
        if self._tethers is not None:
            self._beats.hang_up(self._tethers.hung_up - seen.left.keys())
        if "closed" in seen.over:
            self.closed = seen.over["closed"]
            self.lost = self.lost or self.closed
        elif silent := self._beats.silent(now):
            self.lost = self.lost or self._silence(silent)

    def _note_lost_line(self, error: Exception) -> None:
        from paceline.launch.rendezvous.stores import LineRefused

        if self._stop.is_set():
            return
        if isinstance(error, LineRefused):
            self.lost = self.lost or (
                f"the launcher of node 0 ({self._hosts[0]}), which serves the round, is gone"
            )
        elif time.monotonic() - self._reached > self._timeout:
            self.lost = self.lost or (
                f"node 0 ({self._hosts[0]}) could not be reached for {self._timeout:g} s"
            )

    def _silence(self, silent: Sequence[int]) -> str:
        names = ", ".join(f"node {node} ({self._hosts[node]})" for node in silent)
        if self._tethers is not None and self._tethers.hung_up.issuperset(silent):
            return f"the launcher of {names} is gone"
        verb = "has" if len(silent) == 1 else "have"
        return f"{names} {verb} given no sign of life for {self._timeout:g} s"
