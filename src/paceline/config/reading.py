"""Reading a small file that somebody named, whatever it turns out to be."""

from __future__ import annotations

import os
import stat

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read_small(path: str | os.PathLike[str], most: int) -> tuple[bytes, os.stat_result]:
    """The bytes of an ordinary file, and what the system says of it.

    Raises ``OSError`` where it cannot be opened, and ``ValueError`` with the reason where it is a
    folder, a pipe or a device, which may never end, or holds more than ``most`` bytes.
    """
    # Without waiting: a pipe would keep us until somebody writes to it.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode):
            kind = _KINDS.get(stat.S_IFMT(state.st_mode), "something else")
            raise ValueError(f"is {kind}, not a file")
        data = bytearray()
        while chunk := os.read(handle, min(1 << 20, most + 1 - len(data))):
            data += chunk
    finally:
        os.close(handle)
    if len(data) > most:
        raise ValueError(f"holds more than {most:,} bytes")
    return bytes(data), state
