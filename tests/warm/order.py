"""What a client asks a server for: one process, described in JSON, with its open files beside it."""

from __future__ import annotations

import dataclasses
import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

_SIZE = struct.Struct("!I")
_MAX_FILES = 64


@dataclass
class Order:
    """A process to start."""

    command: list[str]
    """All words, as they are to be seen in ``/proc``."""
    kind: str
    """``-m``, ``-c`` or ``script``."""
    target: str
    arguments: list[str]
    env: dict[str, str]
    cwd: str
    safe_path: bool = False
    unbuffered: bool = False
    new_session: bool = False
    namespaces: list[str] = field(default_factory=list)
    own_mounts: bool = False
    targets: list[int] = field(default_factory=list)
    """The numbers its open files have there; they travel in this order."""


def send(line: socket.socket, order: Order, files: Sequence[int]) -> None:
    """Send an order; ``files`` are the numbers of its open files here."""
    data = json.dumps(dataclasses.asdict(order)).encode()
    socket.send_fds(line, [_SIZE.pack(len(data))], list(files))
    line.sendall(data)


def receive(line: socket.socket) -> tuple[Order, list[int]] | None:
    """The next order and its open files; ``None`` when the client is gone."""
    try:
        head, files, _, _ = socket.recv_fds(line, _SIZE.size, _MAX_FILES)
        if len(head) != _SIZE.size:
            return None
        (size,) = _SIZE.unpack(head)
        data = line.recv(size, socket.MSG_WAITALL)
    except ConnectionError:
        return None
    return (Order(**json.loads(data)), list(files)) if len(data) == size else None
