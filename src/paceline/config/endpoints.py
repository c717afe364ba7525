"""Where machines meet: ``HOST:PORT[,HOST:PORT…]`` as in ``launch.rdzv``, read and checked."""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_PLACES = 64
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_IPV6 = re.compile(r"\[[0-9A-Fa-f:.%a-z]+\]")


@dataclass(frozen=True)
class Endpoint:
    """A host, by name or address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def endpoints(text: str) -> list[Endpoint]:
    """The places that ``text`` names, in order; raises ``ValueError`` when it names none."""
    parts = text.split(",")
    if len(parts) > MOST_PLACES:
        raise ValueError(f"names {len(parts)} places; at most {MOST_PLACES} may stand in")
    found = [_endpoint(part.strip()) for part in parts]
    for endpoint in found:
        if found.count(endpoint) > 1:
            raise ValueError(f"{endpoint} is named twice")
    return found


def _endpoint(text: str) -> Endpoint:
    host, colon, port = text.rpartition(":")
    if not colon or "]" in port:
        raise ValueError(f"{text!r} has no port; write HOST:PORT, like node0:29400")
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(f"{text!r}: {port!r} is not a port; it must be from 1 to 65535")
    if _IPV6.fullmatch(host):
        return Endpoint(host[1:-1], int(port))
    if not _NAME.fullmatch(host):
        raise ValueError(f"{text!r}: {host!r} is not a host name or address")
    return Endpoint(host, int(port))
