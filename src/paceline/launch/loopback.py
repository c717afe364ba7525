"""Keeping other users of this machine away from what listens on loopback.

Any user can connect to a loopback port. Where a connection is accepted here, ``peer_is_us``
looks up whose it is. Where torch accepts it, ``require_key`` has the kernel do so: a connection
without the right TCP MD5 signature (RFC 2385) does not even come about.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator

_TCP_MD5SIG, _TCP_MD5SIG_EXT = 14, 32
_IS_PREFIX = 1
"""The flag of ``TCP_MD5SIG_EXT`` for an address that stands for a whole network."""
_ADDRESS = {
    socket.AF_INET: struct.Struct("=HH4s120x"),
    socket.AF_INET6: struct.Struct("=HHI16sI100x"),
}
"""The kernel's ``struct sockaddr_storage``, with which its ``struct tcp_md5sig`` begins."""
_KEY = struct.Struct("=BBHi80s")
"""The rest of it: flags, length of the prefix, length of the key, interface, key."""
_EVERYBODY = {socket.AF_INET: ("0.0.0.0",), socket.AF_INET6: ("::", "::ffff:0.0.0.0")}
_LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
_CONNECTED = ("01", "08")
"""The states of the kernel's table in which an end can still send: ESTABLISHED, CLOSE_WAIT."""


def require_key(listener: socket.socket, key: bytes) -> str | None:
    """Have a socket on loopback take connections with ``key`` alone; what stays open, in words.

    Whatever address of this machine a connection comes from: any user can bind to 127.0.0.2, or to
    the address of an interface, before connecting. A kernel before Linux 4.13 can ask for the key
    at single addresses only; then it does so at the one that connections come from by themselves.
    """
    family = listener.family
    if all(_set_key(listener, key, address, everybody=True) for address in _EVERYBODY[family]):
        return None
    if _set_key(listener, key, _LOOPBACK[family]):
        return (
            "this kernel has TCP MD5 signatures for single addresses only (no TCP_MD5SIG_EXT): "
            f"who binds to another address than {_LOOPBACK[family]} first"
        )
    return "this system has no TCP MD5 signatures (Linux with CONFIG_TCP_MD5SIG has): who connects"


def connect_with_key(port: int, key: bytes | None) -> socket.socket:
    """A socket that is about to connect to ``port`` of loopback with that key; not blocking."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.setblocking(False)
    if key is not None:
        # Without signatures in this kernel, the listener does not ask for any.
        _set_key(connection, key, _LOOPBACK[socket.AF_INET])
    return connection


def _set_key(end: socket.socket, key: bytes, peer: str, *, everybody: bool = False) -> bool:
    """Sign what goes to ``peer``, and take from it what is signed alone; whether the kernel can."""
    if sys.platform != "linux":
        return False
    address = socket.inet_pton(end.family, peer)
    fields = (0, address) if end.family == socket.AF_INET else (0, 0, address, 0)
    option, flags = (_TCP_MD5SIG_EXT, _IS_PREFIX) if everybody else (_TCP_MD5SIG, 0)
    wanted = _ADDRESS[end.family].pack(end.family, *fields)
    try:
        end.setsockopt(socket.IPPROTO_TCP, option, wanted + _KEY.pack(flags, 0, len(key), 0, key))
    except OSError:  # a kernel without it
        return False
    return True


def others_connected(listener: socket.socket) -> bool:
    """Whether another user has a connection to ``listener``, accepted or not."""
    here = listener.getsockname()[:2]
    return any(
        remote == here and state in _CONNECTED and inode != 0 and user != os.getuid()
        for _, remote, state, user, inode in _connections()
    )


def peer_is_us(connection: socket.socket) -> bool:
    """Whether the other end of an accepted loopback connection is a process of this user.

    True as well where the system does not know, which is everywhere but on Linux. False for an end
    that has been closed: the kernel no longer knows whose it was, and shows root.
    """
    if sys.platform != "linux":
        return True
    peer, own = connection.getpeername()[:2], connection.getsockname()[:2]
    return any(
        (local, remote) == (peer, own)
        and state == _CONNECTED[0]
        and inode != 0
        and user == os.getuid()
        for local, remote, state, user, inode in _connections()
    )


def _connections() -> Iterator[tuple[tuple[str, int], tuple[str, int], str, int, int]]:
    """The kernel's table: local end, remote end, state, user and inode of each connection."""
    for file in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError), open(file, encoding="ascii") as table:
            next(table)
            for line in table:
                fields = line.split()
                user, inode = int(fields[7]), int(fields[9])
                yield _end(fields[1]), _end(fields[2]), fields[3], user, inode


def _end(text: str) -> tuple[str, int]:
    """``0100007F:1F90`` is ``("127.0.0.1", 8080)``: words of the machine's byte order."""
    digits, _, port = text.partition(":")
    words = [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]
    data = b"".join(struct.pack("=I", word) for word in words)
    address = ipaddress.ip_address(data)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(address), int(port, 16)
