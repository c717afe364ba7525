"""Connections between two machines: an echo server with the time, and what connecting to it shows.

The connection that a machine is tried with is also the one that clocks are compared over.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.doctor.facts import ClockOffset, Connection, ConnectOutcome

CONNECT_TIMEOUT_S = 3.0
_ROUND_TRIPS = 10
_TIME = struct.Struct("!d")


class Echo:
    """A server on a port that the system picks; answers each byte with the time by ``now``."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, name="paceline-echo", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.getsockname()[1])

    def close(self) -> None:
        """Stop listening, and end every conversation."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._server.close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=1)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            self._open.add(connection)
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while connection.recv(1):
                connection.sendall(_TIME.pack(self._now()))
        self._open.discard(connection)


@dataclass(frozen=True)
class ConnectResult:
    """How a connection went; ``error`` in the system's words."""

    outcome: ConnectOutcome
    seconds: float = 0.0
    error: str = ""


def connect(
    address: str, port: int, timeout: float = CONNECT_TIMEOUT_S
) -> tuple[socket.socket | None, ConnectResult]:
    """A connection, or ``None`` and why there is none."""
    begin = time.monotonic()
    try:
        connection = socket.create_connection((address, port), timeout=timeout)
    except (OSError, UnicodeError) as error:
        return None, ConnectResult(outcome_of(error), time.monotonic() - begin, _words(error))
    return connection, ConnectResult("ok", time.monotonic() - begin)


def outcome_of(error: Exception) -> ConnectOutcome:
    """Which kind of failure to connect an error is."""
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, TimeoutError) or getattr(error, "errno", None) == errno.ETIMEDOUT:
        return "no answer"
    return "unreachable"


def try_link(
    source: str, target: str, address: str, port: int, *, by_gloo: bool = False
) -> tuple[Connection, ClockOffset | None]:
    """Connect to another machine's ``Echo`` and compare the clocks."""
    connection, tried = connect(address, port)
    clock: ClockOffset | None = None
    if connection is not None:
        with connection:
            try:
                offset, round_trip = _compare_clocks(connection)
                clock = ClockOffset(source, target, offset, round_trip)
            except OSError as error:
                tried = ConnectResult("silent", tried.seconds, _words(error))
    link = Connection(
        source, target, address, port, tried.outcome, tried.seconds, tried.error, by_gloo=by_gloo
    )
    return link, clock


def _compare_clocks(connection: socket.socket) -> tuple[float, float]:
    """How far the other clock is ahead, and the round trip that tells it best, the shortest."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(CONNECT_TIMEOUT_S)
    best = (0.0, float("inf"))
    for _ in range(_ROUND_TRIPS):
        before = time.time()
        connection.sendall(b"?")
        answer = b""
        while len(answer) < _TIME.size:
            part = connection.recv(_TIME.size - len(answer))
            if not part:
                raise ConnectionResetError("the connection was closed")
            answer += part
        after = time.time()
        if after - before < best[1]:
            best = (_TIME.unpack(answer)[0] - (before + after) / 2, after - before)
    return best


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
