"""Other users of this machine, at what a run with a secret has on loopback."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_cases import wait_for

from paceline.launch import loopback
from paceline.launch.loopback import connect_with_key, others_connected, peer_is_us, require_key
from paceline.launch.rendezvous.stores import ServedStore, StoreConnection
from paceline.launch.secret import RunSecret
from paceline.launch.tunnel import Tunnel

NOBODY = 65534
FIN_WAIT_2 = "05"
KEY = b"k" * 32
STRANGER = f"""
import os, socket, sys
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
family, host, port, sources, stay = sys.argv[1:]
for source in sources.split(","):
    connection = socket.socket(int(family))
    connection.settimeout(0.3)
    try:
        if source:
            connection.bind((source, 0))
        connection.connect((host, int(port)))
        connection.sendall(b"hello")
        print("in", source, flush=True)
    except OSError as error:
        print("out", source, flush=True)
    if stay == "stay":
        sys.stdin.read()
    connection.close()
"""

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="to be another user takes root")


def as_nobody(
    port: int, *sources: str, host: str = "127.0.0.1", family: int = socket.AF_INET
) -> list[str]:
    """Who gets in at a port among connections of another user from these addresses."""
    arguments = [str(int(family)), host, str(port), ",".join(sources), "go"]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", STRANGER, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return done.stdout.splitlines()


@contextlib.contextmanager
def nobody_connected(port: int) -> Iterator[None]:
    """Another user has a connection to ``port`` in the meantime."""
    arguments = [str(int(socket.AF_INET)), "127.0.0.1", str(port), "", "stay"]
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", STRANGER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline().startswith("in")
        yield
        process.stdin.close()


def own_addresses() -> list[str]:
    """Addresses of this machine that anybody on it can connect from; nothing is sent."""
    found = ["127.0.0.1", "127.0.0.2", "127.255.255.254"]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        found.append(str(probe.getsockname()[0]))
    return found


def state_of(port: int) -> str:
    """The state of the socket that has ``port``, by the kernel's table."""
    for row in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = row.split()
        if int(fields[1].partition(":")[2], 16) == port:
            return fields[3]
    return ""


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def tunnel(said: list[str]) -> Iterator[Tunnel]:
    with contextlib.closing(Tunnel(RunSecret(b"abcdefgh" * 20, "a secret"), said.append)) as made:
        yield made


@pytest.fixture
def _kernel_has_all() -> None:
    with socket.socket() as probe:
        if require_key(probe, KEY) is not None:
            pytest.skip("this kernel has no TCP_MD5SIG_EXT")


@pytest.mark.usefixtures("_kernel_has_all")
def test_no_address_of_the_machine_leads_another_user_to_a_store(
    tunnel: Tunnel, said: list[str]
) -> None:
    with contextlib.closing(ServedStore("127.0.0.1", 0, tunnel)) as served:
        sources = own_addresses()
        assert as_nobody(served.store.port, *sources) == [f"out {source}" for source in sources]
        connection = StoreConnection("127.0.0.1", served.port, 60.0, tunnel)
        connection.call(lambda store: store.set("a", "b"))
        assert served.store.get("a") == b"b"
        connection.close()
    assert said == []


@pytest.mark.usefixtures("_kernel_has_all")
def test_no_address_of_the_machine_leads_another_user_to_a_locked_listener(tunnel: Tunnel) -> None:
    with tunnel.locked_listener() as listener:
        sources = own_addresses()
        port = listener.getsockname()[1]
        assert as_nobody(port, *sources) == [f"out {source}" for source in sources]


@pytest.mark.usefixtures("_kernel_has_all")
def test_a_key_is_asked_for_over_both_kinds_of_addresses() -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as both:
        port = both.getsockname()[1]
        assert as_nobody(port, "127.0.0.2") == ["in 127.0.0.2"]
        assert require_key(both, KEY) is None
        assert as_nobody(port, "127.0.0.1", "127.0.0.2") == ["out 127.0.0.1", "out 127.0.0.2"]
        assert as_nobody(port, "::1", host="::1", family=socket.AF_INET6) == ["out ::1"]
        with connect_with_key(port, KEY) as ours:
            ours.settimeout(60)
            ours.connect(("127.0.0.1", port))


def test_an_older_kernel_locks_what_it_can_and_the_user_is_told_the_rest_once(
    tunnel: Tunnel, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loopback, "_TCP_MD5SIG_EXT", 9999)  # no option of any kernel
    for _ in range(2):
        with tunnel.locked_listener() as listener:
            port = listener.getsockname()[1]
            found = as_nobody(port, "127.0.0.1", "127.0.0.2")
    assert "in 127.0.0.2" in found
    if "out 127.0.0.1" in found:
        assert "no TCP_MD5SIG_EXT" in said[0]
    assert len(said) == 1
    monkeypatch.setattr(loopback, "_TCP_MD5SIG", 9999)
    with socket.socket() as plain:
        assert "no TCP MD5 signatures" in str(require_key(plain, KEY))


def test_who_was_there_before_the_lock_is_noticed(tunnel: Tunnel) -> None:
    listener, same = tunnel.private_listener()
    with listener, socket.create_connection(listener.getsockname()) as ours:
        assert not others_connected(listener)
        refused = pytest.raises(PermissionError, match="before it was locked")
        with nobody_connected(listener.getsockname()[1]), refused:
            tunnel.lock(same)
        assert ours.fileno() != -1


def test_a_socket_that_another_user_has_closed_is_not_taken_for_one_of_root() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        assert as_nobody(server.getsockname()[1], "127.0.0.1") == ["in 127.0.0.1"]
        accepted, _ = server.accept()
        with accepted:
            assert accepted.recv(10) == b"hello"
            assert not peer_is_us(accepted)
            # When the closing has been acknowledged, all the kernel still shows is user 0.
            port = accepted.getpeername()[1]
            wait_for(lambda: state_of(port) == FIN_WAIT_2 or None, "the end of its socket", 50)
            assert not peer_is_us(accepted)


def test_what_another_user_said_and_left_is_not_passed_on(tunnel: Tunnel, said: list[str]) -> None:
    with tunnel.locked_listener() as inside:
        inside.settimeout(0)
        gate = tunnel.expose(socket.create_server(("127.0.0.1", 0)), inside.getsockname()[1])
        _, port = tunnel.reach("127.0.0.1", gate.port)
        as_nobody(port, "127.0.0.1", "127.0.0.2")
        wait_for(lambda: said or None, "the refusal")
        with pytest.raises(BlockingIOError):
            inside.accept()
