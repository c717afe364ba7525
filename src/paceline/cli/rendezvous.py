"""``paceline rendezvous``: the meeting place as a process of its own, on a machine that stays."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from paceline.cli.screen import echo


def rendezvous(
    port: Annotated[int, typer.Option(metavar="PORT", min=1, max=65535)] = 29400,
) -> None:
    """Serve the place where launchers of several machines meet, until Ctrl-C.

    Run it on a machine that stays, and name that one in --rdzv: then every machine that trains may
    come and go. It needs next to nothing, serves one run at a time, and may be restarted under a
    run.
    """
    import socket

    from paceline.errors import LaunchError
    from paceline.launch.stores import LineLost, serve_meeting

    ended = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: ended.set())
    try:
        store = serve_meeting("0.0.0.0", port)
    except LineLost as error:
        raise LaunchError(f"--port {port}: cannot serve there: {error}") from None
    host = socket.gethostname()
    echo(f"serving at port {port}: paceline train … --rdzv {host}:{port} on each machine")
    while not ended.wait(3600):
        pass
    del store
