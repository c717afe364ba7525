"""``paceline rendezvous``: the rendezvous store as a process of its own, on a lasting machine."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from paceline.cli.options import SecretFile, file_reference
from paceline.cli.screen import echo


def rendezvous(
    port: Annotated[int, typer.Option(metavar="PORT", min=1, max=65535)] = 29400,
    secret_file: SecretFile = None,
) -> None:
    """Serve the rendezvous of launchers on several machines, until Ctrl-C.

    Run it on a machine that stays, and name that one in --rdzv: then every machine that trains may
    come and go. It needs next to nothing, serves one run at a time, and may be restarted under a
    run.
    """
    import socket

    from paceline.config.endpoints import Endpoint
    from paceline.credentials import Secret
    from paceline.errors import LaunchError
    from paceline.launch.secret import find_secret, open_to_strangers

    host = socket.gethostname()
    reference = file_reference(secret_file)
    found = find_secret(None if reference is None else Secret(reference))
    if (warning := open_to_strangers([Endpoint(host, port)], found)) is not None:
        echo(f"warning: {warning}", err=True)
    from paceline.launch.rendezvous.stores import StoreUnreachable, serve_rendezvous
    from paceline.launch.tunnel import Tunnel

    ended = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: ended.set())
    try:
        store = serve_rendezvous("", port, None if found is None else Tunnel(found))
    except StoreUnreachable as error:
        raise LaunchError(f"--port {port}: cannot serve there: {error}") from None
    more = f" --secret-file {secret_file}" if secret_file else ""
    echo(f"serving at port {port}: paceline train … --rdzv {host}:{port}{more} on each machine")
    while not ended.wait(3600):
        pass
    store.close()
