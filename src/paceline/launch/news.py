"""What launchers have to tell: events for the run's one log, and the logs of ranks far away.

A run's events have one writer, the launcher of node 0 (beside rank 0, which is on node 0, too).
The others leave theirs in the round's store, from which it takes them, and says so. What it has not
taken when a round ends is left for it again in the next. Where machines share no disk, the logs of
ranks come the same way, at a bounded rate, so that all are in one place.
"""

from __future__ import annotations

import base64
import json
import threading
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.events import Event

if TYPE_CHECKING:
    from paceline.launch.stores import Line

LOG_BYTES_AT_ONCE = 1 << 16
"""How much of its logs a node sends with each beat, about once a second."""
LOG_BYTES_BEHIND = 1 << 20
"""A log that grows faster is not sent whole: what lies further back is left out, and said so."""

Store = Any  # torch's, which is not imported here
_COUNT, _TAKEN = "news/count", "news/taken"
_KEPT = 1000  # of the events that wait to be delivered; older ones go first


class Mailbox:
    """This launcher's news: ``post`` from any thread, ``exchange`` from the one that watches."""

    def __init__(self, write: Callable[[Event], None], keep_log: Callable[[str, bytes], None]):
        self._write, self._keep_log = write, keep_log
        self._pending: deque[tuple[str, Event]] = deque(maxlen=_KEPT)
        self._on_its_way: list[tuple[int, str, Event]] = []
        self._known: set[str] = set()
        self._lock = threading.Lock()
        self._taken = 0
        self.logs: LogTail | None = None

    def new_round(self) -> None:
        """The store is a fresh one: nothing has been taken from it."""
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

    def exchange(self, line: Line, *, is_main: bool) -> None:
        """Deliver what is pending, or take what the others have delivered."""
        if is_main:
            self._take(line)
            return
        while (first := self._first()) is not None:
            identity, event = first
            text = json.dumps({"event": event.to_json(), "id": identity})
            number = line.call(lambda store, text=text: append(store, text))  # type: ignore[misc]
            self._on_its_way.append((number, identity, event))
            with self._lock:
                self._pending.popleft()
        if self._on_its_way:
            taken = line.call(lambda store: store.add(_TAKEN, 0))
            self._on_its_way = [item for item in self._on_its_way if item[0] > taken]
        if self.logs is not None and (chunk := self.logs.peek()) is not None:
            line.call(lambda store: append(store, json.dumps(chunk)))
            self.logs.sent(chunk)

    def write_pending(self) -> None:
        """This launcher is the one that writes now."""
        while (first := self._first()) is not None:
            self._write_once(*first)
            with self._lock:
                self._pending.popleft()

    def _first(self) -> tuple[str, Event] | None:
        with self._lock:
            return self._pending[0] if self._pending else None

    def _take(self, line: Line) -> None:
        count = line.call(lambda store: store.add(_COUNT, 0))
        while self._taken < count:
            number = self._taken + 1
            try:
                text = line.call(lambda store, n=number: take(store, n))  # type: ignore[misc]
            except KeyError:
                text = None  # whoever was about to tell it died before it had
            if text is not None:
                self._deliver(json.loads(text))
            line.call(lambda store: store.add(_TAKEN, 1))
            self._taken = number

    def _write_once(self, identity: str, event: Event) -> None:
        if identity not in self._known:
            self._known.add(identity)
            self._write(event)

    def _deliver(self, item: dict[str, Any]) -> None:
        if "event" in item:
            event = Event.from_json(item["event"])
            if event is not None:
                self._write_once(item["id"], event)
        else:
            self._keep_log(item["log"], base64.b64decode(item["data"]))


class LogTail:
    """What has been added to the logs of ``host``, which lie in ``folder/node<k>-<host>``."""

    def __init__(self, folder: Path, host: str) -> None:
        self._folder, self._host = folder, host
        self._offsets: dict[Path, int] = {}

    def peek(self) -> dict[str, Any] | None:
        """The next piece of a log that has not been sent yet, ``None`` when all has."""
        for path in sorted(self._folder.glob(f"node*-{self._host}/**/*.log")):
            offset = self._offsets.get(path, 0)
            behind = path.stat().st_size - offset
            if behind <= 0:
                continue
            note = b""
            if behind > LOG_BYTES_BEHIND:
                left_out = behind - LOG_BYTES_AT_ONCE
                offset += left_out
                note = f"\n[{left_out} bytes left out; they are in {path} there]\n".encode()
            with open(path, "rb") as file:
                file.seek(offset)
                data = file.read(LOG_BYTES_AT_ONCE)
            return {
                "log": str(path.relative_to(self._folder)),
                "data": base64.b64encode(note + data).decode(),
                "path": str(path),
                "end": offset + len(data),
            }
        return None

    def sent(self, chunk: dict[str, Any]) -> None:
        """A piece has been delivered."""
        self._offsets[Path(chunk["path"])] = chunk["end"]


def append(store: Store, text: str) -> int:
    """Add a text to those that wait in the store; its number."""
    number = store.add(_COUNT, 1)
    store.set(f"news/{number}", text)
    return int(number)


def take(store: Store, number: int) -> str:
    """The text with this number, which then is gone from the store."""
    text = bytes(store.get(f"news/{number}")).decode()
    store.delete_key(f"news/{number}")
    return text
