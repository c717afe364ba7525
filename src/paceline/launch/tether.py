"""A connection that each launcher keeps to that of node 0, and that says one thing: it broke.

The kernel closes the connections of a process that is killed, so that node 0 knows at once of a
launcher that died; signs of life alone would leave it to the node timeout. A break is a hint, not a
proof (a firewall may have dropped the connection): :class:`~paceline.launch.liveness.Beats` then
has less patience with that node. Of a machine that lost its power, nothing is heard.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading

_KEEP_ALIVE_SECONDS = 60


class Tethers:
    """Node 0's end: which nodes have hung up."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family)
        self.port = int(self._server.getsockname()[1])
        self.hung_up: set[int] = set()
        self._closing, self._closed = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="paceline-tethers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go of all nodes."""
        self._closing.close()
        self._thread.join()

    def _listen(self) -> None:
        nodes: dict[socket.socket, int | None] = {}
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            for listening in (self._server, self._closed):
                stack.enter_context(listening)
                selector.register(listening, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    ready = key.fileobj
                    assert isinstance(ready, socket.socket)
                    if ready is self._closed:
                        return
                    if ready is self._server:
                        peer = stack.enter_context(self._server.accept()[0])
                        nodes[peer] = None
                        selector.register(peer, selectors.EVENT_READ)
                        continue
                    node = _hear(ready)
                    if node is not None:
                        nodes[ready] = node
                        continue
                    selector.unregister(ready)
                    ready.close()
                    gone = nodes.pop(ready)
                    self.hung_up |= {gone} if gone is not None else set()


class Tether:
    """A node's end, held for as long as it is part of the round."""

    def __init__(self, address: str, port: int, node: int, timeout: float) -> None:
        self._socket = socket.create_connection((address, port), timeout=timeout)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):  # Linux: so often that no firewall takes it for unused
            option = socket.TCP_KEEPIDLE
            self._socket.setsockopt(socket.IPPROTO_TCP, option, _KEEP_ALIVE_SECONDS)
        self._socket.sendall(node.to_bytes(4, "big"))

    def close(self) -> None:
        """Let go."""
        self._socket.close()


def _hear(peer: socket.socket) -> int | None:
    """The number with which a node introduces itself; ``None`` when it hung up."""
    try:
        said = peer.recv(4)
    except OSError:
        return None
    return int.from_bytes(said, "big") if said else None
