"""What the pool and its ranks say to each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """What a rank is told: where it stands, and what to call."""

    call: bytes
    """``(function, arguments)``, pickled by value."""
    environ: dict[str, str]
    folder: str
    path: list[str]
    join: bool
    device: str
    timeout: float
    number: int
    """Counts the pool's jobs; each has its own part of the pool's store."""


@dataclass(frozen=True)
class Outcome:
    """What came of it: a pickled ``result``, or an ``error`` with its traceback."""

    result: bytes | None = None
    error: bytes | None = None
    summary: str = ""
    traceback: str = ""
    time: float = 0.0
