"""Ends what runs in network namespaces once the program that made them is gone.

    python -I -S namespace_reaper.py INODE...

Started by ``paceline.testing.hosts``, which holds the other end of its standard input: that
ends with the program, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

_SECONDS = 10.0


def inhabitants(networks: set[int]) -> list[int]:
    """The processes in these networks."""
    found = []
    for entry in os.listdir("/proc"):
        # Suppressed: it is gone by now, or a zombie, which is in no network any more.
        with contextlib.suppress(OSError):
            if entry.isdigit() and os.stat(f"/proc/{entry}/ns/net").st_ino in networks:
                found.append(int(entry))
    return found


def main() -> None:
    """See the module."""
    while os.read(0, 1):
        pass
    networks = {int(inode) for inode in sys.argv[1:]}
    deadline = time.monotonic() + _SECONDS
    while (found := inhabitants(networks)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


if __name__ == "__main__":
    main()
