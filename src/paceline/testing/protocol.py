"""What the pool, the server that forks its ranks, and the ranks send to each other."""

from __future__ import annotations

import signal
import struct
from dataclasses import dataclass

# Between the pool and the server.

FORK, REAP, KILL = b"F", b"R", b"K"
"""Make a rank; collect one that is dying by itself; end one."""
REQUEST = struct.Struct("!ci")
"""A command, and the rank's process id; for a fork, the port of the pool's store."""
REPLY = struct.Struct("!ii")
"""A process id and its wait status (0 for a fork, whose reply carries the rank's socket)."""

# Between the pool and a rank.

# A real-time signal where there are some: jobs and launchers use the ordinary ones themselves.
STACK_SIGNAL: int = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
"""Makes a rank write the Python stack of its threads to its file."""


@dataclass(frozen=True)
class PoolJob:
    """What a rank gets: its environment, and what to call."""

    call: bytes
    """``(function, arguments)``, pickled by value."""
    environ: dict[str, str]
    folder: str
    path: list[str]
    join: bool
    device: str
    share_gpu: bool
    timeout: float
    number: int
    """Counts the pool's jobs; each has its own part of the pool's store."""


@dataclass(frozen=True)
class JobOutcome:
    """What came of it: a pickled ``result``, or an ``error`` with its traceback."""

    result: bytes | None = None
    error: bytes | None = None
    summary: str = ""
    traceback: str = ""
    time: float = 0.0
