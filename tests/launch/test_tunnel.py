"""The secret of a run, and the tunnels it makes: who gets through them, and who does not."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_cases import wait_for

from paceline.config import load
from paceline.config.endpoints import Endpoint, endpoints
from paceline.credentials import Secret
from paceline.errors import ConfigError
from paceline.launch import tunnel as module
from paceline.launch import tunnel_connections
from paceline.launch.environment import SECRET, SECRET_FILE
from paceline.launch.listening import listen
from paceline.launch.loopback import peer_is_us
from paceline.launch.rendezvous import endpoints as rendezvous_endpoints
from paceline.launch.rendezvous.endpoints import RendezvousEndpoints
from paceline.launch.rendezvous.stores import (
    ForeignStore,
    ServedStore,
    StoreConnection,
    StoreRefused,
    StoreUnreachable,
)
from paceline.launch.secret import (
    RunSecret,
    find_secret,
    keys_of,
    make_secret,
    open_to_strangers,
)
from paceline.launch.tunnel import Tunnel, WrongSecret
from paceline.launch.tunnel_connections import MOST_HANDSHAKES
from ports import free_port

NOBODY = 65534
PATIENT = 60.0
"""Seconds for what is there to answer: a busy machine takes some for a handshake."""


def secret(text: str = "abcdefgh") -> RunSecret:
    return RunSecret((text * 20).encode(), f"secret {text}")


# The secret.


def test_a_secret_is_made_for_its_owner_alone_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    make_secret(path)
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text().strip()
    found = find_secret(Secret(f"file:{path}"), {})
    assert found is not None
    assert found.value == text.encode()
    assert find_secret(None, {SECRET_FILE: str(path)}) == found
    assert find_secret(None, {SECRET: text}).value == found.value  # type: ignore[union-attr]
    monkeypatch.setenv("MINE", text)
    assert find_secret(Secret("env:MINE"), {}).value == found.value  # type: ignore[union-attr]
    assert find_secret(None, {}) is None
    for shown in (repr(found), str(found), f"{found}"):
        assert text not in shown
    with pytest.raises(TypeError):
        pickle.dumps(found)
    with pytest.raises(ConfigError, match="is there already"):
        make_secret(path)
    assert path.read_text().strip() == text


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_secret_that_others_can_read_is_refused_with_what_to_run(
    tmp_path: Path, mode: int
) -> None:
    path = tmp_path / "secret"
    make_secret(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        find_secret(Secret(f"file:{path}"), {})


def test_what_is_no_secret_is_refused_and_not_shown(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    short, same = tmp_path / "short", tmp_path / "same"
    short.write_text("hunter2")
    same.write_text("a" * 64)
    for path in (short, same):
        path.chmod(0o600)
    for path in (short, same):
        with pytest.raises(ConfigError, match="could be guessed") as problem:
            find_secret(Secret(f"file:{path}"), {})
        assert "hunter2" not in str(problem.value)
    for reference in (f"file:{tmp_path / 'absent'}", f"file:{folder}", "file:/dev/zero"):
        with pytest.raises(ConfigError, match=reference):
            find_secret(Secret(reference), {})
    with pytest.raises(ConfigError) as problem:
        load(None, ["launch.secret=correct-horse-battery-staple"])
    assert "must not stand here" in str(problem.value)
    assert "correct-horse" not in str(problem.value).replace("--set launch.secret=", "")


def test_keys_follow_from_the_secret_alone() -> None:
    first, again, other = (
        keys_of(secret(text)).certificate for text in ("abcdefgh",) * 2 + ("ijklmnop",)
    )
    assert first == again
    assert first != other


def test_what_is_open_is_said_where_there_is_no_secret() -> None:
    said = open_to_strangers(endpoints("10.0.0.1:29400,node1:29400"), None)
    assert said is not None
    assert "paceline secret FILE" in said
    assert open_to_strangers(endpoints("10.0.0.1:29400"), secret()) is None
    assert open_to_strangers(endpoints("127.0.0.1:29400,localhost:1"), None) is None


# Tunnels.


@pytest.fixture
def here() -> Iterator[Tunnel]:
    with contextlib.closing(Tunnel(secret(), lambda _: None)) as tunnel:
        yield tunnel


@pytest.fixture
def there() -> Iterator[Tunnel]:
    """Another machine of the same run."""
    with contextlib.closing(Tunnel(secret(), lambda _: None)) as tunnel:
        yield tunnel


@pytest.fixture
def served(here: Tunnel) -> Iterator[ServedStore]:
    with contextlib.closing(ServedStore("127.0.0.1", 0, here)) as store:
        yield store


def test_a_store_is_used_through_a_tunnel(there: Tunnel, served: ServedStore) -> None:
    connection = StoreConnection("127.0.0.1", served.port, PATIENT, there)
    connection.call(lambda store: store.set("key", "x" * (3 << 20)))
    assert len(served.store.get("key")) == 3 << 20
    second = connection.another()
    assert second.call(lambda store: store.add("count", 2)) == 2
    threads = [
        threading.Thread(target=lambda: second.call(lambda store: store.add("count", 1)))
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert connection.call(lambda store: store.add("count", 0)) == 22
    for each in (connection, second):
        each.close()


def test_a_store_that_is_closed_is_gone_for_those_who_use_it(there: Tunnel, here: Tunnel) -> None:
    served = ServedStore("127.0.0.1", free_port(), here)
    connection = StoreConnection("127.0.0.1", served.port, PATIENT, there)
    served.close()
    with pytest.raises(StoreUnreachable):
        connection.call(lambda store: store.get("key"))
    with pytest.raises(StoreRefused):
        StoreConnection("127.0.0.1", served.port, PATIENT, there)


def test_the_port_of_a_store_that_is_closed_is_free_at_once(here: Tunnel) -> None:
    port = free_port()
    for _ in range(4):
        ServedStore("127.0.0.1", port, here).close()
    listen("127.0.0.1", port).close()


def test_another_secret_and_none_are_told_apart_and_refused(served: ServedStore) -> None:
    with contextlib.closing(Tunnel(secret("ijklmnop"), lambda _: None)) as other:
        with pytest.raises(ForeignStore, match="another secret than secret ijklmnop"):
            StoreConnection("127.0.0.1", served.port, PATIENT, other)
        silent = listen("127.0.0.1", 0)
        with silent, pytest.raises(WrongSecret, match="was it started without"):
            other.probe("127.0.0.1", silent.getsockname()[1], 0.5)
    with pytest.raises(StoreUnreachable):
        StoreConnection("127.0.0.1", served.port, 1.0)


def test_an_answer_that_comes_too_late_does_not_hide_that_the_secret_is_another(
    here: Tunnel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine may not finish the last handshake in time; the first has shown enough."""

    def why() -> str:
        with pytest.raises(StoreUnreachable) as caught:
            places.find(0, lambda: None)
        return str(caught.value)

    monkeypatch.setattr(rendezvous_endpoints, "is_this_machine", lambda host: False)
    with contextlib.closing(Tunnel(secret("ijklmnop"), lambda _: None)) as other:
        served = ServedStore("127.0.0.1", free_port(), here)
        place = Endpoint("127.0.0.1", served.port)
        places = RendezvousEndpoints([place], 0.5, other)
        wait_for(lambda: "another secret than secret ijklmnop" in why(), "an answer in time")
        served.close()
        with listen("127.0.0.1", served.port):
            assert "another secret than secret ijklmnop" in why()
        assert "nothing answers at" in why(), "whoever that was is gone"


def contexts() -> Iterator[ssl.SSLContext]:
    """TLS as those would speak it who do not have the secret."""
    for text in (None, "ijklmnop"):
        context = (
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            if text is None
            else keys_of(secret(text)).client
        )
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        yield context


def test_without_the_certificate_nothing_reaches_the_store(served: ServedStore) -> None:
    keys = served.store.num_keys()
    for context in contexts():
        plain = socket.create_connection(("127.0.0.1", served.port), timeout=PATIENT)
        with context.wrap_socket(plain) as connection, contextlib.suppress(OSError):
            connection.sendall(b"\0" * 100)
            assert connection.recv(100) == b""
    assert served.store.num_keys() == keys


def test_old_versions_of_tls_are_refused(served: ServedStore) -> None:
    context = keys_of(secret()).client
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    plain = socket.create_connection(("127.0.0.1", served.port), timeout=PATIENT)
    with pytest.raises(ssl.SSLError), plain:
        context.wrap_socket(plain)


def test_silence_garbage_and_floods_do_not_keep_the_real_ones_out(
    there: Tunnel, served: ServedStore
) -> None:
    connection = StoreConnection("127.0.0.1", served.port, PATIENT, there)
    where = ("127.0.0.1", served.port)
    held = [socket.create_connection(where, timeout=PATIENT) for _ in range(MOST_HANDSHAKES)]
    try:
        for number, stranger in enumerate(held):
            with contextlib.suppress(OSError):
                stranger.sendall([b"\x16\x03\x01\x02\x00", os.urandom(300), b"x"][number % 3])
        for _ in range(300):
            socket.create_connection(where, timeout=PATIENT).close()
        there.probe(*where, PATIENT)
        other = StoreConnection(*where, PATIENT, there)
        other.call(lambda store: store.set("a", "b"))
        other.close()
        assert connection.call(lambda store: store.get("a")) == b"b"
    finally:
        for stranger in held:
            stranger.close()
        connection.close()


def test_handshakes_that_are_never_finished_are_ended(
    here: Tunnel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 0.3)
    monkeypatch.setattr(tunnel_connections, "HANDSHAKE_SECONDS", 10 * PATIENT)  # of the whole entry
    with contextlib.closing(ServedStore("127.0.0.1", 0, here)) as served:
        where = ("127.0.0.1", served.port)
        with socket.create_connection(where, timeout=PATIENT) as stranger:
            stranger.sendall(b"\x16\x03\x01")
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b""


def as_nobody(port: int) -> str:
    """What another user of this machine gets to see at a loopback port."""
    script = f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo hello >&3 && timeout 2 head -c 10 <&3"
    done = subprocess.run(
        ["timeout", "3", "bash", "-c", script], user=NOBODY, capture_output=True, text=True
    )
    return done.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="to be another user takes root")
def test_other_users_of_the_machine_do_not_get_in_on_loopback(there: Tunnel) -> None:
    received: list[bytes] = []
    echo, same = there.private_listener()
    there.lock(same)

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = echo.accept()
                with connection:
                    connection.settimeout(PATIENT)
                    received.append(connection.recv(10))
                    connection.sendall(b"welcome")

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        gate = there.expose(listen("127.0.0.1", 0), echo.getsockname()[1])
        host, port = there.reach("127.0.0.1", gate.port)
        assert as_nobody(port) == ""
        assert received == []
        with socket.create_connection((host, port), timeout=PATIENT) as ours:
            ours.sendall(b"hello")
            assert ours.recv(10) == b"welcome"
        assert received == [b"hello"]
    finally:
        echo.shutdown(socket.SHUT_RDWR)
        echo.close()
        thread.join()


@pytest.mark.skipif(os.getuid() != 0, reason="to be another user takes root")
def test_other_users_of_the_machine_do_not_get_to_the_store_itself(
    there: Tunnel, served: ServedStore
) -> None:
    """By the kernel's TCP MD5 signatures, where it has them: the store is torch's to accept."""
    inside = served.store.port
    try:
        socket.create_connection(("127.0.0.1", inside), timeout=0.5).close()
    except TimeoutError:
        assert as_nobody(inside) == ""
        connection = StoreConnection("127.0.0.1", served.port, PATIENT, there)
        connection.call(lambda store: store.set("a", "b"))
        connection.close()
    else:
        pytest.skip("this kernel has no TCP MD5 signatures")


def test_whose_a_connection_is_is_known_over_both_kinds_of_addresses() -> None:
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")):
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(family) as client:
            client.connect((address, server.getsockname()[1]))
            accepted, _ = server.accept()
            with accepted:
                assert peer_is_us(accepted)
