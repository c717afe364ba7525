"""Connections to the stores of a rendezvous, made so that every call ends in time.

A call to torch's ``TCPStore`` over a link that was cut without a word returns when the link is
back, whatever its timeout says (torch 2.11 to 2.13, measured: get, add, check and compare_set
alike). A launcher must not hang on that, so each connection lives in a thread of its own, and a
``StoreConnection`` gives up on it when an answer is overdue. The thread is then left behind:
nothing can wake it but the link or the end of the process.

Imports torch at the top, so it is itself imported only when a rendezvous is about to start.
"""

from __future__ import annotations

import atexit
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistStoreError, Store, TCPStore  # type: ignore[attr-defined]

from paceline.config.endpoints import Endpoint
from paceline.launch.listening import listen
from paceline.launch.tunnel import ExposedPort, NoProof, Tunnel, WrongSecret

T = TypeVar("T")

IDENTITY = "store"
"""The key of a rendezvous store's id: a store that is restarted has another."""

_POLL_SECONDS = 0.1
_LAST_CALLS_SECONDS = 2.0
_Job = tuple[Callable[[Any], Any], "Future[Any]"]
_in_torch: set[threading.Thread] = set()
"""The threads of connections that are inside a call of torch's."""


def let_calls_end() -> None:
    """A thread that comes back from torch while Python shuts down would abort the process.

    A store that goes away at that moment, as node 0's does when a run is done, has it come back.
    """
    deadline = time.monotonic() + _LAST_CALLS_SECONDS
    while _in_torch and time.monotonic() < deadline:
        time.sleep(0.01)


atexit.register(let_calls_end)


class StoreUnreachable(ConnectionError, RuntimeError):
    """A store could not be reached, or did not answer in time.

    A ``RuntimeError`` like all of torch's errors of a store, for those who use one.
    """


class StoreRefused(StoreUnreachable):
    """The machine answers that nobody listens there: whoever served the store is gone."""


class ForeignStore(StoreUnreachable):
    """Whoever listens there does not have our secret, or has ``proved`` nothing yet."""

    def __init__(self, message: str, *, proved: bool = True) -> None:
        super().__init__(message)
        self.proved = proved


class StoreConnection:
    """A connection to the store at ``host:port``; every call ends within ``patience`` seconds.

    Once a call has failed the connection is dead, and every further call fails at once. With a
    ``tunnel`` it goes through that, to a store which is served with the same secret.
    """

    def __init__(self, host: str, port: int, patience: float, tunnel: Tunnel | None = None) -> None:
        self.host, self.port, self.patience = host, port, patience
        self._tunnel = tunnel
        self.own_address, self.peer_address = _probe(host, port, patience, tunnel)
        self._where = (host, port) if tunnel is None else tunnel.reach(host, port)
        self._lock = threading.Lock()
        self._dead: str | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._work, name=f"store-{host}:{port}", daemon=True)
        thread.start()
        self.call(lambda store: store.set("probe", "probe"))

    def call(self, operation: Callable[[Store], T]) -> T:
        """Return ``operation(store)``; raises ``StoreUnreachable`` when it is overdue.

        A key that is not there raises ``KeyError`` after ``patience`` seconds.
        """
        with self._lock:
            if self._dead is not None:
                raise StoreUnreachable(self._dead)
            future: Future[T] = Future()
            self._jobs.put((operation, future))
            try:
                # A little longer than the store's own timeout, which says more.
                return future.result(2 * self.patience)
            except DistStoreError as error:
                raise KeyError(str(error).splitlines()[0]) from error
            except TimeoutError:
                self._dead = f"{self.host}:{self.port} did not answer for {2 * self.patience:g} s"
            except RuntimeError as error:
                self._dead = f"{self.host}:{self.port}: {str(error).splitlines()[0]}"
            self._jobs.put(None)
            raise StoreUnreachable(self._dead)

    def another(self) -> StoreConnection:
        """A new connection to the same store."""
        return StoreConnection(self.host, self.port, self.patience, self._tunnel)

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._dead = self._dead or f"{self.host}:{self.port}: closed"
        self._jobs.put(None)

    def _work(self) -> None:
        store: Store | None = None
        while (job := self._jobs.get()) is not None:
            operation, future = job
            _in_torch.add(threading.current_thread())
            try:
                if store is None:
                    store = TCPStore(
                        *self._where,
                        is_master=False,
                        wait_for_workers=False,
                        timeout=timedelta(seconds=self.patience),
                    )
                future.set_result(operation(store))
            except BaseException as error:
                future.set_exception(error)
            finally:
                _in_torch.discard(threading.current_thread())
            del job, operation, future  # what they hold is not for this thread to keep


class InterruptibleStore(Store):
    """A store for torch's rendezvous over a ``StoreConnection``: its calls end in time, too.

    ``pause`` is called before every operation and while one waits for a key: what it raises ends
    the operation. All keys are under ``prefix``: torch's own ``PrefixStore`` would not keep this
    object alive.
    """

    def __init__(
        self,
        connection: StoreConnection,
        pause: Callable[[], None],
        key_patience: float,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self._connection, self._pause, self._key_patience = connection, pause, key_patience
        self._prefix = f"{prefix}/" if prefix else ""
        self._clones: list[InterruptibleStore] = []

    def clone(self) -> InterruptibleStore:
        """The same store over a connection of its own."""
        copy = InterruptibleStore(self._connection.another(), self._pause, self._key_patience)
        copy._prefix = self._prefix
        self._clones.append(copy)
        return copy

    def close(self) -> None:
        """Close the connection, and those of all clones."""
        for copy in self._clones:
            copy.close()
        self._connection.close()

    def get(self, key: str) -> bytes:
        """The value of ``key``, waited for."""
        full = self._prefix + key
        deadline = time.monotonic() + self._key_patience
        while True:
            self._pause()
            if self._connection.call(lambda store: store.check([full])):
                return bytes(self._connection.call(lambda store: store.get(full)))
            if time.monotonic() > deadline:
                raise StoreUnreachable(f"no {key} after {self._key_patience:g} s")
            time.sleep(_POLL_SECONDS)

    def set(self, key: str, value: str) -> None:
        """Give ``key`` a value."""
        self._pause()
        self._connection.call(lambda store: store.set(self._prefix + key, value))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Give ``key`` a value if it has the expected one; returns what it has then."""
        self._pause()
        full = self._prefix + key
        return bytes(self._connection.call(lambda s: s.compare_set(full, expected, desired)))

    def add(self, key: str, amount: int) -> int:
        """Count ``key`` up; returns what it is then."""
        self._pause()
        return int(self._connection.call(lambda store: store.add(self._prefix + key, amount)))

    def check(self, keys: list[str]) -> bool:
        """Whether all ``keys`` are there."""
        self._pause()
        full = [self._prefix + key for key in keys]
        return bool(self._connection.call(lambda store: store.check(full)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for all ``keys``."""
        seconds = self._key_patience if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise DistStoreError(f"wait timeout after {seconds:g} s, keys: {keys}")
            time.sleep(_POLL_SECONDS)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of ``keys``, waited for."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Give several keys a value."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        """Forget a key."""
        self._pause()
        return bool(self._connection.call(lambda store: store.delete_key(self._prefix + key)))


def serve(host: str, port: int) -> TCPStore:
    """Host a store on this machine for as long as the object lives; port 0 is any free one.

    It listens as ``listen`` does, where torch by itself would listen at every address of the
    machine. Raises ``StoreUnreachable`` where the port is taken.
    """
    listener = _listen(host, port)
    # The store connects to itself: at loopback, where it listens at all addresses.
    address, number = listener.getsockname()[:2]
    own = "127.0.0.1" if address in ("0.0.0.0", "::") else address
    try:
        return TCPStore(
            own,
            number,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except RuntimeError as error:
        raise StoreUnreachable(f"{host}:{port}: {str(error).splitlines()[0]}") from error


class ServedStore:
    """A store that this process serves to other machines, until it is closed.

    With a ``tunnel``, only to those that have its secret: the store itself is on loopback then, and
    locked for everybody but the tunnel.
    """

    def __init__(self, host: str, port: int, tunnel: Tunnel | None = None) -> None:
        self._exposed: ExposedPort | None = None
        if tunnel is None:
            self.store = serve(host, port)
            self.port = int(self.store.port)
            return
        outside = _listen(host, port)
        inside, same = tunnel.private_listener()
        number = int(inside.getsockname()[1])
        self.store = TCPStore(
            "127.0.0.1",
            number,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=inside.detach(),
        )
        tunnel.lock(same)
        self._exposed = tunnel.expose(outside, number)
        self.port = self._exposed.port

    def close(self) -> None:
        """Serve it no longer."""
        if self._exposed is not None:
            self._exposed.close()
        del self.store


def serve_rendezvous(host: str, port: int, tunnel: Tunnel | None = None) -> ServedStore:
    """Serve a rendezvous store, with an id by which launchers know whether it is still the same."""
    served = ServedStore(host, port, tunnel)
    served.store.set(IDENTITY, uuid.uuid4().hex)
    return served


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        raise StoreUnreachable(error.strerror or str(error)) from error


def reach(endpoint: Endpoint, patience: float, tunnel: Tunnel | None = None) -> StoreConnection:
    """Connect to the rendezvous store at ``endpoint``, or raise ``StoreUnreachable``."""
    connection = StoreConnection(endpoint.host, endpoint.port, patience, tunnel)
    try:
        connection.call(lambda store: store.get(IDENTITY))
    except KeyError:
        connection.close()
        raise StoreUnreachable(f"{endpoint} is no rendezvous") from None
    return connection


def _probe(host: str, port: int, patience: float, tunnel: Tunnel | None) -> tuple[str, str]:
    """Try once whether somebody listens there; returns our address on the way there, and theirs."""
    try:
        if tunnel is not None:
            return tunnel.probe(host, port, patience)
        with socket.create_connection((host, port), timeout=patience) as probe:
            return str(probe.getsockname()[0]), str(probe.getpeername()[0])
    except ConnectionRefusedError as error:
        raise StoreRefused(f"{host}:{port}: nobody listens there") from error
    except WrongSecret as error:
        raise ForeignStore(str(error), proved=not isinstance(error, NoProof)) from error
    except OSError as error:
        raise StoreUnreachable(f"{host}:{port}: {error.strerror or error}") from error
