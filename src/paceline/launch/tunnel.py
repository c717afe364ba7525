"""Tunnels between the machines of a run: what torch's stores say, authenticated and encrypted.

Torch's TCPStore knows neither. So where a run has a secret, a store listens on loopback alone, and

    a process → loopback → its launcher's forwarder ═ TLS 1.3 ═ gate of the other → loopback → store

with mutual TLS by the keys that follow from the secret. Nothing of a connection reaches the store
before the handshake has shown that the other end has the secret.

All of it runs in one thread with an event loop. A handshake has a time limit, and so many of one
machine may be under way at a door, and so many in all; of a machine that has more, those that
linger go first, and then those that come. So neither connections that say nothing nor a flood of
them keep the other machines out.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline.launch.background_errors import BackgroundErrors, to_stderr
from paceline.launch.listening import listen
from paceline.launch.loopback import (
    connect_with_key,
    others_connected,
    peer_is_us,
    require_key,
)
from paceline.launch.secret import RunSecret, keys_of, store_key

HANDSHAKE_SECONDS = 5.0
MOST_HANDSHAKES = 128
"""Connections at one door that have not shown yet who they are."""
MOST_HANDSHAKES_OF_ONE = 32
"""Those of them that come from one address."""
_LINGERING_SECONDS = 1.0
_ACCEPTED_AT_ONCE = 64
_CONNECT_SECONDS = 15.0
_CONNECTING_AT_ONCE = 8
_TRIES = 5
_PAUSE_SECONDS = 0.2
_LOOPBACK = "127.0.0.1"


class WrongSecret(ConnectionError):
    """Who listens there has another secret, or none."""


class _Dropped(WrongSecret):
    """The connection was ended before anything was said."""


class Tunnel:
    """This process's tunnels of one run; ``close`` ends them all."""

    def __init__(self, secret: RunSecret, notice: Callable[[str], None] = to_stderr) -> None:
        self.secret = secret
        self._keys, self._store_key = keys_of(secret), store_key(secret)
        self._notice, self._told_open = notice, False
        self._errors = BackgroundErrors("the tunnel between the machines", notice)
        self._loop = asyncio.new_event_loop()
        # Never more than a gate allows to one machine, which may have many ranks.
        self._connecting = asyncio.Semaphore(_CONNECTING_AT_ONCE)
        self._lock = threading.Lock()
        self._forwarders: dict[tuple[str, int], _Door] = {}
        self._doors: set[_Door] = set()
        self._thread = threading.Thread(target=self._run, name="paceline-tunnel", daemon=True)
        self._thread.start()

    # The server's end.

    def private_listener(self) -> tuple[socket.socket, socket.socket]:
        """A listener on loopback for a server of this process, and the same one to lock it by.

        For a server that has to connect to itself first, as torch's store does. For any other there
        is :meth:`locked_listener`.
        """
        listener = listen(_LOOPBACK, 0)
        return listener, listener.dup()

    def lock(self, listener: socket.socket) -> None:
        """From now on only our own gates get through to it; for connections that are to come.

        Raises ``PermissionError`` where another user has come before, and is there still.
        """
        with listener:
            self._require_key(listener)
            if others_connected(listener):
                raise PermissionError(
                    "another user of this machine connected to port "
                    f"{listener.getsockname()[1]} of loopback before it was locked: start again"
                )

    def locked_listener(self) -> socket.socket:
        """A listener on loopback that only our own gates ever get through to."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind((_LOOPBACK, 0))
            self._require_key(listener)
            listener.listen(socket.SOMAXCONN)
        except BaseException:
            listener.close()
            raise
        return listener

    def _require_key(self, listener: socket.socket) -> None:
        """Lock it as far as the kernel can; the user is told once what stays open."""
        still_open = require_key(listener, self._store_key)
        if still_open is not None and not self._told_open:
            self._told_open = True
            self._notice(
                f"{still_open} as another user of this machine reaches the stores of this run, "
                "secret or not: do not share the machine with users you do not trust"
            )

    def expose(self, listener: socket.socket, port: int) -> Gate:
        """Let those with the secret who come to ``listener`` through to ``port`` of loopback.

        That of a private listener, which must have been locked, or of a locked one.
        """

        async def enter(connection: socket.socket) -> _End:
            outer = await self._greet(connection)
            await self._connect_inside(outer, port)
            return outer

        return Gate(self, self._open(listener, enter))

    # The client's end.

    def reach(self, host: str, port: int) -> tuple[str, int]:
        """Where on loopback processes of this user get to what is exposed at ``host:port``."""
        with self._lock:
            door = self._forwarders.get((host, port))
            if door is None:
                listener = listen(_LOOPBACK, 0)

                async def enter(connection: socket.socket) -> _End:
                    ours = await self._loop.run_in_executor(None, peer_is_us, connection)
                    if not ours:
                        raise PermissionError("of another user of this machine, or closed already")
                    _, inner = await self._loop.connect_accepted_socket(_End, connection)
                    await self._connect_outside(inner, host, port)
                    return inner

                door = self._forwarders[host, port] = self._open(listener, enter)
            return _LOOPBACK, door.port

    def forget(self, host: str, port: int) -> None:
        """Nobody is to be led to ``host:port`` any more; who is connected stays so."""
        with self._lock:
            door = self._forwarders.pop((host, port), None)
        if door is not None:
            self._close(door)

    def probe(self, host: str, port: int, timeout: float) -> tuple[str, str]:
        """Whether somebody with our secret is there; our address on the way there, and theirs.

        Raises :class:`WrongSecret`, or another ``OSError`` where nobody can be reached.
        """
        for _ in range(_TRIES - 1):
            # One that is ended before it began may have met a flood.
            with contextlib.suppress(_Dropped):
                return self._probe_once(host, port, timeout)
            time.sleep(_PAUSE_SECONDS)
        return self._probe_once(host, port, timeout)

    def _probe_once(self, host: str, port: int, timeout: float) -> tuple[str, str]:
        with socket.create_connection((host, port), timeout=timeout) as plain:
            addresses = str(plain.getsockname()[0]), str(plain.getpeername()[0])
            try:
                with self._keys.client.wrap_socket(plain) as connection:
                    if not self._keys.is_ours(connection):
                        raise WrongSecret(f"{host}:{port} has another secret")
            except ssl.SSLCertVerificationError:
                raise WrongSecret(f"{host}:{port} has another secret than {self.secret}") from None
            except (ssl.SSLError, TimeoutError, ConnectionError) as error:
                if isinstance(error, WrongSecret):
                    raise
                dropped = isinstance(error, (ssl.SSLEOFError, ConnectionResetError))
                raise (_Dropped if dropped else WrongSecret)(
                    f"{host}:{port} answers, but not as one with our secret ({self.secret}) would: "
                    "was it started without?"
                ) from None
        return addresses

    def close(self) -> None:
        """End all tunnels."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    # In the thread of the loop.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        # What a task of a dropped connection raised was reported already, or is nobody's business.
        self._loop.set_exception_handler(lambda loop, context: None)
        try:
            self._loop.run_forever()
        finally:
            for door in list(self._doors):
                door.close()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            with contextlib.suppress(Exception):
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
                self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def _open(
        self, listener: socket.socket, enter: Callable[[socket.socket], Awaitable[_End]]
    ) -> _Door:
        door = _Door(listener, enter, self._errors)
        self._doors.add(door)
        asyncio.run_coroutine_threadsafe(door.serve(), self._loop)
        return door

    def _close(self, door: _Door) -> None:
        self._doors.discard(door)
        with contextlib.suppress(RuntimeError):  # the loop has ended, and all doors with it
            self._loop.call_soon_threadsafe(door.close)

    async def _greet(self, connection: socket.socket) -> _End:
        """The end of a connection whose other end has shown that it has the secret."""
        transport, end = await self._loop.connect_accepted_socket(
            _End,
            connection,
            ssl=self._keys.server,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=1.0,
        )
        self._check(transport)
        return end

    async def _connect_inside(self, outer: _End, port: int) -> None:
        with outer.closed_on_error():
            connection = connect_with_key(port, self._store_key)
            try:
                await self._loop.sock_connect(connection, (_LOOPBACK, port))
            except BaseException:
                connection.close()
                raise
            _, inner = await self._loop.create_connection(_End, sock=connection)
            outer.join(inner)

    async def _connect_outside(self, inner: _End, host: str, port: int) -> None:
        with inner.closed_on_error():
            async with asyncio.timeout(_CONNECT_SECONDS), self._connecting:
                outer = await self._shake_hands(host, port)
            inner.join(outer)

    async def _shake_hands(self, host: str, port: int) -> _End:
        """A connection to a gate; tried again where that was too busy to begin with it."""
        for number in range(_TRIES):
            try:
                transport, outer = await self._loop.create_connection(
                    _End,
                    host,
                    port,
                    ssl=self._keys.client,
                    server_hostname="",
                    ssl_handshake_timeout=HANDSHAKE_SECONDS,
                    ssl_shutdown_timeout=1.0,
                )
            except (ConnectionResetError, ssl.SSLEOFError):
                if number == _TRIES - 1:
                    raise
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                self._check(transport)
                return outer
        raise AssertionError("not reached")

    def _check(self, transport: asyncio.BaseTransport) -> None:
        if not self._keys.is_ours(transport.get_extra_info("ssl_object")):
            transport.abort()  # type: ignore[attr-defined]
            raise PermissionError("a connection with another certificate")


class Gate:
    """What is exposed at ``port``, until it is closed."""

    def __init__(self, tunnel: Tunnel, door: _Door) -> None:
        self._tunnel, self._door = tunnel, door
        self.port = door.port

    def close(self) -> None:
        """Let nobody in any more, and those out who are in."""
        self._tunnel._close(self._door)


class _End(asyncio.Protocol):
    """One end of a connection that is passed on: what comes in goes out at the other."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._other: _End | None = None
        self._early: list[bytes] = []
        self._lost = False

    def join(self, other: _End) -> None:
        """From now on these two are one connection."""
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
        """Where the other half of the way cannot be made, there is no use for this one."""
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
class _Guest:
    """A connection that has not shown yet who it is, and where it comes from."""

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


class _Door:
    """Accepts connections and has each ``enter``; bounded as the module says."""

    def __init__(
        self,
        listener: socket.socket,
        enter: Callable[[socket.socket], Awaitable[_End]],
        errors: BackgroundErrors,
    ) -> None:
        listener.setblocking(False)
        self.port = int(listener.getsockname()[1])
        self._listener, self._enter, self._errors = listener, enter, errors
        self._entering: dict[asyncio.Task[None], _Guest] = {}
        self._inside: set[_End] = set()
        self._closed = False

    async def serve(self) -> None:
        """Accept, one connection a turn, so that those inside are served in between."""
        loop = asyncio.get_running_loop()
        while not self._closed:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                if not self._closed:
                    self._errors.report(error, "accepting a connection")
                    await asyncio.sleep(_PAUSE_SECONDS)  # no file descriptor left, say
                continue
            self._admit(connection)
            self._admit_those_behind()
            await asyncio.sleep(0)

    def _admit_those_behind(self) -> None:
        """Those that have queued up: what must be turned away is to be so quickly."""
        with contextlib.suppress(OSError):  # there is nobody any more
            for _ in range(_ACCEPTED_AT_ONCE):
                self._admit(self._listener.accept()[0])

    def close(self) -> None:
        """Close the door, and end what came in by it."""
        self._closed = True
        with contextlib.suppress(Exception):
            asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for task in list(self._entering):
            task.cancel()
        for end in list(self._inside):
            end.abort()

    def _admit(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            guest = _Guest(connection, _machine_of(connection))
        except OSError:
            connection.close()
            return
        if not self._make_room(guest.machine):
            connection.close()
            return
        task = asyncio.get_running_loop().create_task(self._let_in(connection))
        self._entering[task] = guest
        task.add_done_callback(lambda done: self._entering.pop(done, None))

    def _make_room(self, machine: str) -> bool:
        """Whether one more connection of ``machine`` may begin; one that lingers may go for it."""
        machines = Counter(guest.machine for guest in self._entering.values())
        if machines[machine] < MOST_HANDSHAKES_OF_ONE and len(self._entering) < MOST_HANDSHAKES:
            return True
        if machines[machine] < MOST_HANDSHAKES_OF_ONE:
            machine = machines.most_common(1)[0][0]
            patience = 0.0
        else:
            patience = _LINGERING_SECONDS
        task = next(t for t, guest in self._entering.items() if guest.machine == machine)
        if time.monotonic() - self._entering[task].came < patience:
            return False
        self._entering.pop(task).connection.close()
        task.cancel()
        return True

    async def _let_in(self, connection: socket.socket) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS + _CONNECT_SECONDS):
                end = await self._enter(connection)
        except PermissionError as error:
            connection.close()
            self._errors.report(error, "a connection was refused")
        except (OSError, asyncio.CancelledError):
            connection.close()  # a stranger's, or one that gave up
        except Exception as error:
            connection.close()
            self._errors.report(error, "a connection was refused")
        else:
            self._inside = {one for one in self._inside if not one._lost} | {end}
