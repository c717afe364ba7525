"""The terminal, or whatever stands for it: full, closed or gone, it is not the command's fault."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from paceline.untrusted import printable


def open_standard_streams() -> None:
    """Give a process that was started without one of its streams an empty one.

    Or else the next file that is opened gets its number, and what is printed ends up there.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            empty = os.open(os.devnull, os.O_RDWR)
            if empty != number:
                os.dup2(empty, number)
                os.close(empty)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 (for good)


def say(line: str = "", *, error: bool = False) -> None:
    """Print a line. A console that takes none (closed pipe, full disk) gets no more of them.

    Without this, a command that ended well would leave with the status of a broken pipe.
    """
    stream = sys.stderr if error else sys.stdout
    try:
        print(printable(line), file=stream, flush=True)
    except UnicodeEncodeError:
        say(line.encode("ascii", "backslashreplace").decode(), error=error)
    except (OSError, ValueError):  # a ValueError where the stream itself was closed
        give_up(stream)


def give_up(stream: TextIO) -> None:
    """Send what is still to come nowhere, or Python itself complains when it flushes at exit."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # one that a program has put in its place
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
