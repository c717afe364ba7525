"""Sockets that listen where they are asked to, and at no other address of the machine."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator

_BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at ``host``, if that is an address of this machine, else everywhere.

    Everywhere as well where it is a name: the others may know the machine by another of its
    addresses than it does itself. ``localhost`` is an address. Raises ``OSError`` where the port is
    taken.
    """
    address = "127.0.0.1" if host == "localhost" else host
    with contextlib.suppress(ValueError):
        plain = ipaddress.ip_address(address.partition("%")[0])
        if is_this_machine(address) and not plain.is_unspecified:
            family = socket.AF_INET6 if plain.version == 6 else socket.AF_INET
            return _listen((address, port), family)
    both = socket.has_dualstack_ipv6()
    return _listen(("", port), socket.AF_INET6 if both else socket.AF_INET, both=both)


def is_this_machine(host: str) -> bool:
    """Whether ``host`` is a name or an address of this machine."""
    for family, address in _addresses(host):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
            return True
    return False


def is_loopback(address: str) -> bool:
    """Whether an address, or ``localhost``, is one that only this machine can mean by it."""
    try:
        return ipaddress.ip_address(address.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return address in ("localhost", "ip6-localhost")


def _listen(
    address: tuple[str, int], family: socket.AddressFamily, *, both: bool = False
) -> socket.socket:
    try:
        return socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        where = f"{address[0]}:{address[1]}" if address[0] else f"port {address[1]}"
        raise OSError(error.errno, f"{where}: {error.strerror or error}") from error


def _addresses(host: str) -> Iterator[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return
    for family, _, _, _, address in found:
        yield family, str(address[0])
