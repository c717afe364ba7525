"""Keeping other users of this machine away from what listens on loopback.

Any user can connect to a loopback port. Where a connection is accepted here, :func:`peer_is_us`
looks up whose it is. Where torch accepts it, :func:`require_key` has the kernel do so: a connection
without the right TCP MD5 signature (RFC 2385) does not even come about.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys

_TCP_MD5SIG = 14
_MD5SIG = struct.Struct("HH4s120xBBHi80s")
"""The kernel's ``struct tcp_md5sig`` with an IPv4 address."""
_FROM_LOOPBACK = "127.0.0.1"


def require_key(listener: socket.socket, key: bytes) -> bool:
    """Have a socket on loopback take connections with ``key`` alone; whether the kernel can."""
    return _set_key(listener, key)


def connect_with_key(port: int, key: bytes | None) -> socket.socket:
    """A socket that is about to connect to ``port`` of loopback with that key; not blocking."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.setblocking(False)
    if key is not None:
        _set_key(connection, key)
    return connection


def _set_key(end: socket.socket, key: bytes) -> bool:
    if sys.platform != "linux":
        return False
    address = socket.inet_aton(_FROM_LOOPBACK)
    wanted = _MD5SIG.pack(socket.AF_INET, 0, address, 0, 0, len(key), 0, key)
    try:
        end.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG, wanted)
    except OSError:  # a kernel without it
        return False
    return True


def peer_is_us(connection: socket.socket) -> bool:
    """Whether the other end of an accepted loopback connection is a process of this user.

    True as well where the system does not tell, which is everywhere but on Linux.
    """
    if sys.platform != "linux":
        return True
    peer, own = connection.getpeername(), connection.getsockname()
    return _user_of(peer, own) == os.getuid()


def _user_of(local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    """Who has the socket with these ends, by the kernel's table of connections."""
    for file in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError), open(file, encoding="ascii") as table:
            next(table)
            for line in table:
                fields = line.split()
                if _end(fields[1]) == local[:2] and _end(fields[2]) == remote[:2]:
                    return int(fields[7])
    return None


def _end(text: str) -> tuple[str, int]:
    """``0100007F:1F90`` is ``("127.0.0.1", 8080)``: words of the machine's byte order."""
    digits, _, port = text.partition(":")
    words = [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]
    data = b"".join(struct.pack("=I", word) for word in words)
    address = ipaddress.ip_address(data)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(address), int(port, 16)
