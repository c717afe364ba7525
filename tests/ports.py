"""Ports for tests that have to name one before anybody listens there."""

from __future__ import annotations

import contextlib
import random
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

_RANGE = range(11000, 19000)
"""Below the ports that Linux gives out by itself, and those that torch and SLURM runs take."""
_claims: list[socket.socket] = []


def free_port() -> int:
    """A port that nobody listens on, and that stays the caller's until this process ends.

    One that the kernel has given out and taken back may be given to somebody else at once, to
    listen on or to connect from. So this is one that the kernel does not give out, and no other
    call returns it, in this process or in any other that runs tests on this machine.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    for port in _candidates():
        with contextlib.suppress(OSError), contextlib.ExitStack() as unless_free:
            claim = unless_free.enter_context(socket.socket(socket.AF_UNIX))
            if sys.platform == "linux":  # a name of its own, which is gone with this process
                claim.bind(f"\0paceline-test-port-{port}")
            socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
            unless_free.pop_all()
            _claims.append(claim)
            return port
    raise AssertionError(f"no port of {_RANGE} is free")


def _candidates() -> Iterator[int]:
    given_out = range(0)
    with contextlib.suppress(OSError):
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        given_out = range(int(first), int(last) + 1)
    ports = [port for port in _RANGE if port not in given_out] or list(_RANGE)
    random.SystemRandom().shuffle(ports)
    return iter(ports)
