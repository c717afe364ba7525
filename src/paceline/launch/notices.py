"""Notices from a rank to the console, for when its log and the run's events cannot carry them.

A pipe from the ranks to their launcher: it needs no disk and no network. The launcher passes its
writing end on to every process it starts, and shows each line that comes.
"""

from __future__ import annotations

import contextlib
import os
import stat

VARIABLE = "PACELINE_NOTICES"
"""In a rank's environment: the descriptor, and the pipe's inode, by which it is known to be it."""

_LONGEST = 4000  # a write of this size to a pipe is never mixed with another's
_CHUNK = 1 << 16


class NoticePipe:
    """The launcher's end."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self.writing, False)  # a launcher that stands still keeps no rank waiting
        self._partial = b""

    def variables(self) -> dict[str, str]:
        """The environment variable by which a rank finds the pipe."""
        return {VARIABLE: f"{self.writing}:{os.fstat(self.writing).st_ino}"}

    def take(self) -> list[str]:
        """The lines that have come since the last call."""
        with contextlib.suppress(BlockingIOError):
            self._partial += os.read(self._reading, _CHUNK)
        *lines, self._partial = self._partial.split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def close(self) -> None:
        """No more lines are wanted."""
        os.close(self._reading)
        os.close(self.writing)


def send(message: str) -> bool:
    """From a rank: have its launcher show ``message``; false where no launcher reads it."""
    descriptor = _own_end()
    if descriptor is None:
        return False
    line = " ".join(message.split()).encode()[:_LONGEST] + b"\n"
    try:
        return os.write(descriptor, line) == len(line)
    except OSError:  # the launcher is gone, or does not read
        return False


def do_not_inherit() -> None:
    """From a rank: keep the pipe from the processes that it starts."""
    descriptor = _own_end()
    if descriptor is not None:
        os.set_inheritable(descriptor, False)


def _own_end() -> int | None:
    number, _, inode = os.environ.get(VARIABLE, "").partition(":")
    if not number.isdecimal():
        return None
    try:
        found = os.fstat(int(number))
    except OSError:
        return None
    is_it = stat.S_ISFIFO(found.st_mode) and str(found.st_ino) == inode
    return int(number) if is_it else None
