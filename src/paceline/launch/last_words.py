"""What a rank that ends by an error has to say besides the error: who knows something adds it here.

The worker collects the words when it writes the error down; the launcher tells them. No torch here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

_speakers: list[Callable[[], str]] = []


def add(speaker: Callable[[], str]) -> None:
    """Ask ``speaker`` when this process ends by an error."""
    _speakers.append(speaker)


def remove(speaker: Callable[[], str]) -> None:
    """Do not ask it any more."""
    with contextlib.suppress(ValueError):
        _speakers.remove(speaker)


def collect() -> str:
    """Everything there is to say, a line each; a speaker that fails says nothing."""
    lines = []
    for speaker in _speakers:
        # The error that ends the rank counts, not one that comes up while telling of it.
        with contextlib.suppress(Exception):
            lines.append(speaker())
    return "\n".join(line for line in lines if line)
