"""Forwarding events and rank logs from other machines to node 0, which writes the run folder.

A run's events have one writer, the launcher of node 0 (beside rank 0, which is on node 0, too).
The others put theirs into the round's store, from which node 0 takes and acknowledges them. What it
has not taken when a round ends is sent again in the next. Where machines share no disk, the logs of
ranks go the same way, at a bounded rate, so that all are in one place.
"""

from __future__ import annotations

import base64
import binascii
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.events import Event
from paceline.launch.background_errors import BackgroundErrors
from paceline.launch.logs import LogName, node_folder
from paceline.launch.messages import BadMessage, check, decode, encode

if TYPE_CHECKING:
    from paceline.launch.rendezvous.stores import StoreConnection

LOG_BYTES_AT_ONCE = 1 << 16
"""How much of its logs a node sends with each heartbeat, about once a second."""
LOG_BYTES_BEHIND = 1 << 20
"""A log that grows faster is not sent whole: what lies further back is left out, with a note."""

Store = Any  # torch's, which is not imported here
_COUNT, _TAKEN = "forwarded/count", "forwarded/taken"
_KEPT = 1000  # of the events that wait to be delivered; older ones go first


@dataclass(frozen=True)
class ForwardedEvent:
    """An event on its way; of those with the same ``id`` one is written."""

    event: str
    id: str


@dataclass(frozen=True)
class LogPiece:
    """What was added to a log of node ``sender`` of this round, in base64."""

    log: LogName
    sender: int
    data: str


class EventForwarder:
    """Sends this launcher's events to node 0; on node 0, writes those of all launchers.

    ``post`` may be called from any thread, ``exchange`` from the heartbeat thread. What others have
    sent may be anything, and ``write`` and ``keep_log`` may fail (a full disk): each message is
    delivered, or reported to ``notice`` and left out, and never in the way of the next.
    """

    def __init__(
        self,
        write: Callable[[Event], None],
        keep_log: Callable[[LogName, str, bytes], None],
        notice: Callable[[str], None] | None = None,
    ) -> None:
        self._write, self._keep_log = write, keep_log
        who = "the launcher"
        self._errors = BackgroundErrors(who) if notice is None else BackgroundErrors(who, notice)
        self._hosts: list[str] = []
        self._node = 0
        self._pending: deque[tuple[str, Event]] = deque(maxlen=_KEPT)
        self._on_its_way: list[tuple[int, str, Event]] = []
        self._known: set[str] = set()
        self._lock = threading.Lock()
        self._taken = 0
        self.logs: LogTail | None = None

    def new_round(self, hosts: Sequence[str] = (), node: int = 0) -> None:
        """Begin with the fresh store of a round of these hosts, in which we are node ``node``."""
        self._hosts, self._node = list(hosts), node
        self._taken = 0
        with self._lock:
            again = [(identity, event) for _, identity, event in self._on_its_way]
            self._pending.extendleft(reversed(again))
        self._on_its_way = []

    def post(self, event: Event, *, is_main: bool, identity: str | None = None) -> None:
        """Write an event, or keep it for the next exchange.

        Of events with the same ``identity``, whoever posts them, one is written.
        """
        identity = identity or uuid.uuid4().hex
        if is_main:
            self._write_once(identity, event)
            return
        with self._lock:
            self._pending.append((identity, event))

    def exchange(self, connection: StoreConnection, *, is_main: bool) -> None:
        """Deliver what is pending, or take what the others have delivered."""
        if is_main:
            self._take(connection)
            return
        while (first := self._first()) is not None:
            identity, event = first
            text = encode(ForwardedEvent(event.to_json(), identity))
            number = connection.call(lambda store, text=text: append(store, text))  # type: ignore[misc]
            self._on_its_way.append((number, identity, event))
            with self._lock:
                self._pending.popleft()
        if self._on_its_way:
            taken = connection.call(lambda store: store.add(_TAKEN, 0))
            self._on_its_way = [item for item in self._on_its_way if item[0] > taken]
        with self._errors.reported("sending logs to node 0", but=(ConnectionError, KeyError)):
            self._send_logs(connection)

    def write_pending(self) -> None:
        """Write what is pending: this launcher is node 0 now."""
        while (first := self._first()) is not None:
            with self._errors.reported("writing an event"):
                self._write_once(*first)
            with self._lock:
                self._pending.popleft()

    def _send_logs(self, connection: StoreConnection) -> None:
        if self.logs is not None and (chunk := self.logs.peek()) is not None:
            piece = LogPiece(chunk.name, self._node, base64.b64encode(chunk.data).decode())
            connection.call(lambda store: append(store, encode(piece)))
            self.logs.sent(chunk)

    def _first(self) -> tuple[str, Event] | None:
        with self._lock:
            return self._pending[0] if self._pending else None

    def _take(self, connection: StoreConnection) -> None:
        count = connection.call(lambda store: store.add(_COUNT, 0))
        while self._taken < count:
            number = self._taken + 1
            try:
                text = connection.call(lambda store, n=number: take(store, n))  # type: ignore[misc]
            except KeyError:
                text = None  # the sender died before it had written it
            if text is not None:
                with self._errors.reported("a forwarded message was left out"):
                    self._deliver(text)
            connection.call(lambda store: store.add(_TAKEN, 1))
            self._taken = number

    def _write_once(self, identity: str, event: Event) -> None:
        if identity not in self._known:
            self._known.add(identity)
            self._write(event)

    def _deliver(self, text: bytes) -> None:
        item: ForwardedEvent | LogPiece = decode(ForwardedEvent | LogPiece, text)  # type: ignore[arg-type]
        if isinstance(item, ForwardedEvent):
            event = Event.from_json(item.event)
            if event is not None:
                self._write_once(item.id, check(event))
            return
        if not 0 <= item.sender < len(self._hosts) or item.sender == self._node:
            raise BadMessage(f"a log of node {item.sender}, which is no other node of this world")
        try:
            data = base64.b64decode(item.data, validate=True)
        except binascii.Error as error:
            raise BadMessage(f"a log that is not base64: {error}") from None
        self._keep_log(item.log, self._hosts[item.sender], data)


@dataclass(frozen=True)
class LogChunk:
    """A piece of a log that ends at byte ``end`` of the file at ``path``."""

    name: LogName
    data: bytes
    path: Path
    end: int


class LogTail:
    """What has been added to the logs of the ranks of ``host``, which lie under ``folder``."""

    def __init__(self, folder: Path, host: str) -> None:
        self._folder, self._host = folder, host
        self._offsets: dict[Path, int] = {}

    def peek(self) -> LogChunk | None:
        """The next piece of a log that has not been sent yet, ``None`` when all has."""
        ours = node_folder(0, self._host).removeprefix("node0-")
        for path in sorted(self._folder.glob(f"node*-{ours}/**/rank*.log")):
            name = LogName.of(path, self._folder, self._host)
            offset = self._offsets.get(path, 0)
            behind = path.stat().st_size - offset
            if name is None or behind <= 0:
                continue
            note = b""
            if behind > LOG_BYTES_BEHIND:
                left_out = behind - LOG_BYTES_AT_ONCE
                offset += left_out
                note = f"\n[{left_out} bytes left out; they are in {path} there]\n".encode()
            with open(path, "rb") as file:
                file.seek(offset)
                data = file.read(LOG_BYTES_AT_ONCE)
            return LogChunk(name, note + data, path, offset + len(data))
        return None

    def sent(self, chunk: LogChunk) -> None:
        """A piece has been delivered."""
        self._offsets[chunk.path] = chunk.end


def append(store: Store, text: str) -> int:
    """Add a text to those that wait in the store; its number."""
    number = store.add(_COUNT, 1)
    store.set(f"forwarded/{number}", text)
    return int(number)


def take(store: Store, number: int) -> bytes:
    """What was left under this number, which then is gone from the store."""
    text = bytes(store.get(f"forwarded/{number}"))
    store.delete_key(f"forwarded/{number}")
    return text
