"""Gathering names and interfaces of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooSlow
from pathlib import Path

from paceline.doctor.facts import Interface, Lookup, Network

LOOKUP_TIMEOUT_S = 10.0
_ADAPTERS = "/sys/class/infiniband"
_NETWORK_PREFIXES = ("NCCL_", "GLOO_", "FI_")

# Linux: asks for the address, and for the flags, of an interface; and the flag for "up".
_SIOCGIFADDR = 0x8915
_SIOCGIFFLAGS = 0x8913
_IFF_UP = 1


def gather_network(address: str = "") -> Network:
    """This machine's network; ``address`` is the one that the other machines reach it by."""
    host = socket.gethostname()
    return Network(
        host=host,
        own_name=look_up([host])[0],
        interfaces=gather_interfaces(),
        address=address,
        gloo_variable=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        nccl_variable=os.environ.get("NCCL_SOCKET_IFNAME", ""),
        adapters=_adapters(),
        variables=network_variables(os.environ),
        port_range=_port_range(),
    )


def network_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """``NAME=value`` of the variables that NCCL, Gloo and libfabric read."""
    return tuple(sorted(f"{k}={v}" for k, v in environ.items() if k.startswith(_NETWORK_PREFIXES)))


def _adapters() -> tuple[str, ...]:
    with contextlib.suppress(OSError):
        return tuple(sorted(os.listdir(_ADAPTERS)))
    return ()


def look_up(names: Sequence[str]) -> list[Lookup]:
    """Look names up, all at once; a name server that does not answer is given up on."""
    if not names:
        return []
    pool = ThreadPoolExecutor(len(names), thread_name_prefix="paceline-lookup")
    deadline = time.monotonic() + LOOKUP_TIMEOUT_S
    tried = [(name, pool.submit(_look_up, name)) for name in names]
    found = []
    for name, future in tried:
        try:
            found.append(future.result(max(0.0, deadline - time.monotonic())))
        except TooSlow:
            error = f"no answer within {LOOKUP_TIMEOUT_S:g} s"
            found.append(Lookup(name, seconds=LOOKUP_TIMEOUT_S, error=error))
    pool.shutdown(wait=False)
    return found


def _look_up(name: str) -> Lookup:
    begin = time.monotonic()
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        text = getattr(error, "strerror", None) or str(error)
        return Lookup(name, seconds=time.monotonic() - begin, error=text)
    addresses = tuple(dict.fromkeys(str(answer[4][0]) for answer in answers))
    return Lookup(name, addresses, time.monotonic() - begin)


def gather_interfaces() -> tuple[Interface, ...]:
    """The interfaces that are up, with their addresses."""
    addresses: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            flags = _ask(asking, _SIOCGIFFLAGS, name)
            if flags is not None and struct.unpack_from("H", flags, 16)[0] & _IFF_UP:
                answer = _ask(asking, _SIOCGIFADDR, name)
                own = [] if answer is None else [socket.inet_ntoa(answer[20:24])]
                addresses[name] = own
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            if name in addresses:
                packed = bytes.fromhex(digits)
                addresses[name].append(socket.inet_ntop(socket.AF_INET6, packed))
    return tuple(Interface(name, tuple(found)) for name, found in addresses.items())


def _ask(asking: socket.socket, request: int, name: str) -> bytes | None:
    """The kernel's answer about an interface; ``None`` where it has none."""
    try:
        return fcntl.ioctl(asking, request, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to ``host``; empty where there is no way.

    Nothing is sent: a datagram socket that is connected knows its address.
    """
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return ""
    for family, kind, protocol, _, address in answers:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as asking:
            asking.connect(address)
            return str(asking.getsockname()[0])
    return ""


def _port_range() -> tuple[int, int] | None:
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:
        return None
    return int(first), int(last)
