"""The connections of a tunnel: accepted with limits, and forwarded.

A handshake has a time limit. Only so many may be pending from one machine, and so many in all; of a
machine that has more, the oldest are dropped first, then the new ones. So neither silent
connections nor a flood of them keep the other machines out.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline.launch.background_errors import BackgroundErrors

HANDSHAKE_SECONDS = 5.0
MOST_HANDSHAKES = 128
"""Connections at one listener that have not authenticated yet."""
MOST_HANDSHAKES_OF_ONE = 32
"""Those of them that come from one address."""
CONNECT_SECONDS = 15.0
PAUSE_SECONDS = 0.2
_LINGERING_SECONDS = 1.0
_ACCEPTED_AT_ONCE = 64


class ForwardedConnection(asyncio.Protocol):
    """One end of a forwarded connection: what it receives goes out at the other."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._other: ForwardedConnection | None = None
        self._early: list[bytes] = []
        self._lost = False

    @property
    def is_lost(self) -> bool:
        """Whether the connection is gone."""
        return self._lost

    def join(self, other: ForwardedConnection) -> None:
        """Connect the two: what one receives, the other sends."""
        self._other, other._other = other, self
        for end in (self, other):
            for data in end._early:
                end.data_received(data)
            end._early.clear()
            if end._lost:
                end.connection_lost(None)
            elif end._transport is not None and not end._transport.is_reading():
                end._transport.resume_reading()

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close this end if the other one cannot be connected."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the connection when all that is on its way has been sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection, and the other half with it, now."""
        for end in (self, self._other):
            if end is not None and end._transport is not None:
                end._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: Any) -> None:
        """It is there; nothing is read before there is somebody to pass it on to."""
        self._transport = transport
        plain = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._other is None:
            transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        if self._other is None:
            self._early.append(data)
        elif self._other._transport is not None:
            self._other._transport.write(data)

    def pause_writing(self) -> None:
        """More than can be sent has come in at the other end."""
        if self._other is not None and not self._other._lost:
            self._other._transport.pause_reading()

    def resume_writing(self) -> None:
        """It has been sent."""
        if self._other is not None and not self._other._lost:
            self._other._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """One half is gone: so is the other."""
        self._lost = True
        if self._other is not None:
            self._other.close()


@dataclass(frozen=True)
class _PendingConnection:
    """A connection that has not authenticated yet, and where it comes from."""

    connection: socket.socket
    machine: str
    came: float = field(default_factory=time.monotonic)


def _machine_of(connection: socket.socket) -> str:
    """The address of the other end; of an IPv6 one the network, of which one machine has it all."""
    address = ipaddress.ip_address(str(connection.getpeername()[0]).partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
    return str(address)


class BoundedAcceptor:
    """Accepts connections and lets each ``enter``; bounded as the module says."""

    def __init__(
        self,
        listener: socket.socket,
        enter: Callable[[socket.socket], Awaitable[ForwardedConnection]],
        errors: BackgroundErrors,
    ) -> None:
        listener.setblocking(False)
        self.port = int(listener.getsockname()[1])
        self._listener, self._enter, self._errors = listener, enter, errors
        self._pending: dict[asyncio.Task[None], _PendingConnection] = {}
        self._admitted: set[ForwardedConnection] = set()
        self._closed = False

    async def serve(self) -> None:
        """Accept one connection at a time, so that open ones are served in between."""
        loop = asyncio.get_running_loop()
        while not self._closed:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                if not self._closed:
                    self._errors.report(error, "accepting a connection")
                    await asyncio.sleep(PAUSE_SECONDS)  # no file descriptor left, say
                continue
            self._admit(connection)
            self._admit_queued()
            await asyncio.sleep(0)

    def _admit_queued(self) -> None:
        """Handle the queue at once: what must be turned away should be so quickly."""
        with contextlib.suppress(OSError):  # there is nobody any more
            for _ in range(_ACCEPTED_AT_ONCE):
                self._admit(self._listener.accept()[0])

    def close(self) -> None:
        """Stop accepting, and end the connections that were accepted."""
        self._closed = True
        with contextlib.suppress(Exception):
            asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for task in list(self._pending):
            task.cancel()
        for end in list(self._admitted):
            end.abort()

    def _admit(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            pending = _PendingConnection(connection, _machine_of(connection))
        except OSError:
            connection.close()
            return
        if not self._make_room(pending.machine):
            connection.close()
            return
        task = asyncio.get_running_loop().create_task(self._admit_one(connection))
        self._pending[task] = pending
        task.add_done_callback(lambda done: self._pending.pop(done, None))

    def _make_room(self, machine: str) -> bool:
        """Whether one more connection of ``machine`` may begin; one that lingers may go for it."""
        machines = Counter(pending.machine for pending in self._pending.values())
        if machines[machine] < MOST_HANDSHAKES_OF_ONE and len(self._pending) < MOST_HANDSHAKES:
            return True
        if machines[machine] < MOST_HANDSHAKES_OF_ONE:
            machine = machines.most_common(1)[0][0]
            patience = 0.0
        else:
            patience = _LINGERING_SECONDS
        task = next(t for t, pending in self._pending.items() if pending.machine == machine)
        if time.monotonic() - self._pending[task].came < patience:
            return False
        self._pending.pop(task).connection.close()
        task.cancel()
        return True

    async def _admit_one(self, connection: socket.socket) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS + CONNECT_SECONDS):
                end = await self._enter(connection)
        except PermissionError as error:
            connection.close()
            self._errors.report(error, "a connection was refused")
        except (OSError, asyncio.CancelledError):
            connection.close()  # not one of ours, or one that gave up
        except Exception as error:
            connection.close()
            self._errors.report(error, "a connection was refused")
        else:
            self._admitted = {one for one in self._admitted if not one.is_lost} | {end}
