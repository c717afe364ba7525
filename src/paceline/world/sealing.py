"""Closing Gloo's doors once everybody is in.

Every Gloo group has a socket that listens for as long as the group lives, though all its
connections are made when it is. Gloo takes whatever connects there: a stranger's connections stay
open until the process has no file descriptors left, and then Gloo ends the process (torch 2.13). So
the kernel drops whatever else connects, by a filter on the socket: a program of one
instruction that accepts no packet. Connections that are made are not affected.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator

_SO_ATTACH_FILTER = 26
_ACCEPT_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET: keep 0 bytes of the packet
_LAZY = "TORCH_GLOO_LAZY_INIT"


@contextlib.contextmanager
def sealed(backend: str | None = "gloo") -> Iterator[None]:
    """For making a process group: of what listens because of it, nobody else gets in.

    Only where ``backend`` is Gloo alone: NCCL connects when it needs to.
    """
    if backend != "gloo" or sys.platform != "linux" or os.environ.get(_LAZY, "0") not in ("", "0"):
        yield
        return
    before = set(_listening())
    yield
    for descriptor, identity in _listening():
        if (descriptor, identity) not in before:
            _seal(descriptor)


def _listening() -> Iterator[tuple[int, int]]:
    """The sockets of this process that listen as Gloo's do, each with what identifies it.

    Python's own, and those of most other libraries, are closed in child processes: Gloo's are not.
    """
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        with contextlib.suppress(OSError):
            if fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                continue
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with _copy_of(descriptor) as copy:
                is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield descriptor, os.fstat(descriptor).st_ino


@contextlib.contextmanager
def _copy_of(descriptor: int) -> Iterator[socket.socket]:
    """The socket behind ``descriptor`` under one of its own, which is closed whatever comes."""
    own = os.dup(descriptor)
    try:
        copy = socket.socket(fileno=own)
    except OSError:  # no socket (any more): nobody else would close what was copied
        os.close(own)
        raise
    with copy:
        yield copy


def _seal(descriptor: int) -> None:
    program = ctypes.create_string_buffer(_ACCEPT_NOTHING)
    wanted = struct.pack("HP", 1, ctypes.addressof(program))
    # A sandbox may forbid it: then it stays as torch leaves it.
    with contextlib.suppress(OSError), _copy_of(descriptor) as copy:
        copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, wanted)
