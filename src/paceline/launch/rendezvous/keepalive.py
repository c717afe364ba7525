"""A connection that each launcher keeps open to that of node 0. It carries nothing: it may break.

The kernel closes the connections of a process that is killed, so node 0 knows at once of a launcher
that died; with heartbeats alone it would wait for the node timeout. A broken connection is a hint,
not a proof (a firewall may have dropped it): the heartbeats of that node then get a shorter
timeout. A machine that loses its power closes nothing.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable

from paceline.launch.background_errors import BackgroundErrors, to_stderr

_KEEP_ALIVE_SECONDS = 60
_NAME_SECONDS = 10.0
_PAUSE_SECONDS = 0.2
_MOST_UNNAMED = 64
"""Connections that have not sent their node number; any more of them are not ours."""


class KeepAliveServer:
    """Node 0's end: accepts the connections of ``nodes`` nodes, and notes which of them broke."""

    def __init__(
        self, server: socket.socket, nodes: int, notice: Callable[[str], None] = to_stderr
    ) -> None:
        self._nodes = nodes
        self._errors = BackgroundErrors("the watch over launcher connections", notice)
        self._server = server
        self.port = int(self._server.getsockname()[1])
        self.disconnected: set[int] = set()
        self._closing, self._closed = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="paceline-keepalive", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections."""
        self._closing.close()
        self._thread.join()

    def _listen(self) -> None:
        self._named: dict[socket.socket, int] = {}
        self._unnamed: dict[socket.socket, float] = {}
        with selectors.DefaultSelector() as selector, self._server, self._closed:
            for listening in (self._server, self._closed):
                listening.setblocking(False)
                selector.register(listening, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select(_NAME_SECONDS)]
                if self._closed in ready:
                    break
                for peer in ready:
                    assert isinstance(peer, socket.socket)
                    with self._errors.reported():
                        if peer is self._server:
                            self._accept(selector)
                        else:
                            self._hear(peer, selector)
                self._drop_unnamed(selector)
            for peer in (*self._named, *self._unnamed):
                peer.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            peer = self._server.accept()[0]
        except OSError:
            time.sleep(_PAUSE_SECONDS)  # no file descriptor left, say: not in a busy loop
            raise
        peer.setblocking(False)
        self._unnamed[peer] = time.monotonic()
        selector.register(peer, selectors.EVENT_READ)

    def _hear(self, peer: socket.socket, selector: selectors.BaseSelector) -> None:
        """A node sends its number, in four bytes, and then nothing more until it is gone."""
        try:
            said = peer.recv(4)
        except OSError:
            said = b""
        node = int.from_bytes(said, "big") if len(said) == 4 else -1
        if peer in self._unnamed and 0 < node < self._nodes:
            del self._unnamed[peer]
            self._named[peer] = node
            return
        gone = self._named.get(peer)
        self._drop(peer, selector)
        # A second connection of the same node (after a firewall dropped the first) speaks for it.
        if gone is not None and gone not in self._named.values():
            self.disconnected |= {gone}

    def _drop_unnamed(self, selector: selectors.BaseSelector) -> None:
        """Drop connections that do not send their number in time, and the oldest of too many."""
        overdue = time.monotonic() - _NAME_SECONDS
        late = [peer for peer, since in self._unnamed.items() if since < overdue]
        for peer in late or list(self._unnamed)[:-_MOST_UNNAMED]:
            self._drop(peer, selector)

    def _drop(self, peer: socket.socket, selector: selectors.BaseSelector) -> None:
        selector.unregister(peer)
        peer.close()
        self._named.pop(peer, None)
        self._unnamed.pop(peer, None)


class KeepAliveConnection:
    """A node's end, open for as long as it is part of the round."""

    def __init__(self, address: str, port: int, node: int, timeout: float) -> None:
        self._socket = socket.create_connection((address, port), timeout=timeout)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):  # Linux: so often that no firewall takes it for unused
            option = socket.TCP_KEEPIDLE
            self._socket.setsockopt(socket.IPPROTO_TCP, option, _KEEP_ALIVE_SECONDS)
        self._socket.sendall(node.to_bytes(4, "big"))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
