"""The process that ranks are forked from: it imports torch once, so that a new rank is cheap.

Started by ``RankPool`` as ``python -m paceline.testing.server FD
FOLDER MODULE…``. It answers requests on the control socket FD one at a time and reaps a rank only
when asked to, so that a process id the pool holds is never anyone else's. When the pool's end of
the socket closes (also by SIGKILL), it kills its ranks and exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import time

from paceline.testing.protocol import FORK, REAP, REPLY, REQUEST

_SECONDS_TO_DIE = 1.0


def main(arguments: list[str]) -> None:
    """Import what ranks need, then serve until the pool is gone."""
    control = socket.socket(fileno=int(arguments[0]))
    folder, modules = arguments[1], arguments[2:]
    gc.disable()  # while there is no garbage, looking for it takes a quarter of the time
    for name in modules:
        importlib.import_module(name)
    gc.enable()
    # What is imported now lives for ever: keep it out of garbage collections, so that they are
    # quick and do not touch (and so copy) the pages that forked ranks share.
    gc.collect()
    gc.freeze()
    ranks: set[int] = set()
    try:
        while len(request := control.recv(REQUEST.size, socket.MSG_WAITALL)) == REQUEST.size:
            command, number = REQUEST.unpack(request)
            if command == FORK:
                _fork(control, folder, number, ranks)
            else:
                ranks.discard(number)
                patience = _SECONDS_TO_DIE if command == REAP else 0.0
                control.sendall(REPLY.pack(number, _reap(number, patience)))
    finally:
        for pid in ranks:
            _reap(pid, 0)


def _fork(control: socket.socket, folder: str, store_port: int, ranks: set[int]) -> None:
    ours, theirs = socket.socketpair()
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        control.close()
        _become_rank(theirs, folder, store_port, server)
    theirs.close()
    ranks.add(pid)
    socket.send_fds(control, [REPLY.pack(pid, 0)], [ours.fileno()])
    ours.close()


def _become_rank(connection: socket.socket, folder: str, store_port: int, server: int) -> None:
    """Live as a rank; never returns into the server's code."""
    status = 1
    try:
        die_with_parent(server)
        # Its own session: Ctrl-C reaches the pool's owner alone, and whatever a job starts can
        # be killed together with its rank.
        os.setsid()
        # A shell that starts something in the background has it ignore Ctrl-C, for good: jobs that
        # send one to themselves or to what they start mean it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from paceline.testing.rank import serve

        serve(connection.detach(), folder, store_port)
        status = 0
    finally:
        os._exit(status)


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies; elsewhere the server does it itself."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)


def _reap(pid: int, patience: float) -> int:
    """Collect a rank that is dying by itself, or kill it, with everything in its session."""
    deadline = time.monotonic() + patience
    flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
    while os.waitid(os.P_PID, pid, flags) is None and time.monotonic() < deadline:
        time.sleep(0.005)
    for kill in (os.killpg, os.kill):  # the group may not exist yet or any more
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


if __name__ == "__main__":
    main(sys.argv[1:])
