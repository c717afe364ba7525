"""Tunnels between the machines of a run: encrypted, authenticated connections to torch's stores.

Torch's TCPStore itself is neither encrypted nor authenticated. So where a run has a
secret, a store listens on loopback alone, and

    a process → loopback → its launcher ═ TLS 1.3 ═ the other launcher → loopback → store

with mutual TLS by the keys that are derived from the secret. Nothing of a connection reaches the
store before the handshake has shown that the other end has the secret.

All of it runs in one thread with an event loop. ``tunnel_connections.py`` accepts and forwards the
connections, and keeps a flood of them from locking out the other machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable

from paceline.launch.background_errors import BackgroundErrors, to_stderr
from paceline.launch.listening import listen
from paceline.launch.loopback import (
    connect_with_key,
    others_connected,
    peer_is_us,
    require_key,
)
from paceline.launch.secret import RunSecret, keys_of, store_key
from paceline.launch.tunnel_connections import (
    CONNECT_SECONDS,
    HANDSHAKE_SECONDS,
    PAUSE_SECONDS,
    BoundedAcceptor,
    ForwardedConnection,
)

_CONNECTING_AT_ONCE = 8
_TRIES = 5
_LOOK_SECONDS = 0.1
_LOOPBACK = "127.0.0.1"


class WrongSecret(ConnectionError):
    """Who listens there has another secret, or none."""


class NoProof(WrongSecret):
    """Who listens there did not finish the handshake: it has no secret, or no time to answer."""


class _Dropped(NoProof):
    """The connection was ended before the handshake began."""


class Tunnel:
    """This process's tunnels of one run; ``close`` ends them all."""

    def __init__(self, secret: RunSecret, notice: Callable[[str], None] = to_stderr) -> None:
        self.secret = secret
        self._keys, self._store_key = keys_of(secret), store_key(secret)
        self._notice, self._reported_open = notice, False
        self._errors = BackgroundErrors("the tunnel between the machines", notice)
        self._loop = asyncio.new_event_loop()
        # Never more than are accepted of one machine, which may have many ranks.
        self._connecting = asyncio.Semaphore(_CONNECTING_AT_ONCE)
        self._lock = threading.Lock()
        self._forwarders: dict[tuple[str, int], BoundedAcceptor] = {}
        self._acceptors: set[BoundedAcceptor] = set()
        self._thread = threading.Thread(target=self._run, name="paceline-tunnel", daemon=True)
        self._thread.start()

    # The server's end.

    def private_listener(self) -> tuple[socket.socket, socket.socket]:
        """A listener on loopback for a server of this process, and a copy of it for ``lock``.

        For a server that has to connect to itself first, as torch's store does. For any other there
        is ``locked_listener``.
        """
        listener = listen(_LOOPBACK, 0)
        return listener, listener.dup()

    def lock(self, listener: socket.socket) -> None:
        """From now on only our own tunnels can connect to it.

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
        """A listener on loopback that only our own tunnels can ever connect to."""
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
        """Lock it as far as the kernel can; reports once what stays open."""
        still_open = require_key(listener, self._store_key)
        if still_open is not None and not self._reported_open:
            self._reported_open = True
            self._notice(
                f"{still_open} as another user of this machine reaches the stores of this run, "
                "secret or not: do not share the machine with users you do not trust"
            )

    def expose(self, listener: socket.socket, port: int) -> ExposedPort:
        """Let those with the secret who come to ``listener`` through to ``port`` of loopback.

        That of a private listener, which must have been locked, or of a locked one.
        """

        async def enter(connection: socket.socket) -> ForwardedConnection:
            outer = await self._accept_tls(connection)
            await self._connect_inside(outer, port)
            return outer

        acceptor = self._open(listener, enter)
        return ExposedPort(acceptor.port, lambda: self._close(acceptor))

    # The client's end.

    def reach(self, host: str, port: int) -> tuple[str, int]:
        """Where on loopback processes of this user get to what is exposed at ``host:port``."""
        with self._lock:
            acceptor = self._forwarders.get((host, port))
            if acceptor is None:
                listener = listen(_LOOPBACK, 0)

                async def enter(connection: socket.socket) -> ForwardedConnection:
                    ours = await self._loop.run_in_executor(None, peer_is_us, connection)
                    if not ours:
                        raise PermissionError("of another user of this machine, or closed already")
                    _, inner = await self._loop.connect_accepted_socket(
                        ForwardedConnection, connection
                    )
                    await self._connect_outside(inner, host, port)
                    return inner

                acceptor = self._forwarders[host, port] = self._open(listener, enter)
            return _LOOPBACK, acceptor.port

    def forget(self, host: str, port: int) -> None:
        """Accept no more connections to ``host:port``; those that exist stay."""
        with self._lock:
            acceptor = self._forwarders.pop((host, port), None)
        if acceptor is not None:
            self._close(acceptor)

    def probe(self, host: str, port: int, timeout: float) -> tuple[str, str]:
        """Check that somebody with our secret is there; our address on the way there, and theirs.

        Raises ``WrongSecret``, or another ``OSError`` where nobody can be reached.
        """
        for _ in range(_TRIES - 1):
            # A connection that was dropped at once may have come during a flood.
            with contextlib.suppress(_Dropped):
                return self._probe_once(host, port, timeout)
            time.sleep(PAUSE_SECONDS)
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
                raise (_Dropped if dropped else NoProof)(
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
            for acceptor in list(self._acceptors):
                acceptor.close()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            with contextlib.suppress(Exception):
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
                self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def _open(
        self,
        listener: socket.socket,
        enter: Callable[[socket.socket], Awaitable[ForwardedConnection]],
    ) -> BoundedAcceptor:
        acceptor = BoundedAcceptor(listener, enter, self._errors)
        self._acceptors.add(acceptor)
        asyncio.run_coroutine_threadsafe(acceptor.serve(), self._loop)
        return acceptor

    def _close(self, acceptor: BoundedAcceptor) -> None:
        """Close it, and return when it is closed: its port may be wanted again at once."""
        closed = threading.Event()

        def close() -> None:
            try:
                self._acceptors.discard(acceptor)
                acceptor.close()
            finally:
                closed.set()

        with contextlib.suppress(RuntimeError):  # the loop has ended, and all acceptors with it
            self._loop.call_soon_threadsafe(close)
            while self._thread.is_alive() and not closed.wait(_LOOK_SECONDS):
                pass

    async def _accept_tls(self, connection: socket.socket) -> ForwardedConnection:
        """The end of a connection whose other end has shown that it has the secret."""
        transport, end = await self._loop.connect_accepted_socket(
            ForwardedConnection,
            connection,
            ssl=self._keys.server,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=1.0,
        )
        self._check(transport)
        return end

    async def _connect_inside(self, outer: ForwardedConnection, port: int) -> None:
        with outer.closed_on_error():
            connection = connect_with_key(port, self._store_key)
            try:
                await self._loop.sock_connect(connection, (_LOOPBACK, port))
            except BaseException:
                connection.close()
                raise
            _, inner = await self._loop.create_connection(ForwardedConnection, sock=connection)
            outer.join(inner)

    async def _connect_outside(self, inner: ForwardedConnection, host: str, port: int) -> None:
        with inner.closed_on_error():
            async with asyncio.timeout(CONNECT_SECONDS), self._connecting:
                outer = await self._handshake(host, port)
            inner.join(outer)

    async def _handshake(self, host: str, port: int) -> ForwardedConnection:
        """A connection to an exposed port; tried again where that was too busy to accept it."""
        for number in range(_TRIES):
            try:
                transport, outer = await self._loop.create_connection(
                    ForwardedConnection,
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
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                self._check(transport)
                return outer
        raise AssertionError("not reached")

    def _check(self, transport: asyncio.BaseTransport) -> None:
        if not self._keys.is_ours(transport.get_extra_info("ssl_object")):
            transport.abort()  # type: ignore[attr-defined]
            raise PermissionError("a connection with another certificate")


class ExposedPort:
    """What is exposed at ``port``, until it is closed."""

    def __init__(self, port: int, close: Callable[[], None]) -> None:
        self.port, self._close = port, close

    def close(self) -> None:
        """Accept no more connections, and end those that exist."""
        self._close()
