"""Hosts on one machine: what passes between them, what does not, and what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.testing.hosts import Hosts, HostsUnavailable, hosts_available
from paceline.testing.processes import is_alive

pytestmark = [
    pytest.mark.skipif(hosts_available() is not None, reason=str(hosts_available())),
    pytest.mark.cold,  # each process counts, and none imports torch
]

SERVER = """
import socket
server = socket.create_server(("", 5000))
print("ready", flush=True)
while True:
    peer, _ = server.accept()
    while data := peer.recv(1 << 20):
        if data.endswith(b"."):
            peer.sendall(b"!")
    peer.close()
"""
# Prints the seconds that the bytes took to be answered for, or the error.
CLIENT = """
import socket, sys, time
try:
    with socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[3])) as peer:
        peer.sendall(b".")
        assert peer.recv(1) == b"!"
        start = time.monotonic()
        peer.sendall(b"x" * int(sys.argv[2]) + b".")
        assert peer.recv(1) == b"!"
        print(time.monotonic() - start)
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture
def served():
    """Two hosts; the second one answers on port 5000."""
    with Hosts(2) as hosts:
        server = hosts[1].popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
        with server:
            assert server.stdout.readline() == "ready\n"
            yield hosts
            server.kill()


def ask(host, size: int = 0, to: str = "host1", timeout: float = 30) -> str:
    command = [sys.executable, "-c", CLIENT, to, str(size), str(timeout)]
    return host.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_hosts_reach_each_other_by_name_and_nobody_else(served):
    assert [host.name for host in served] == ["host0", "host1"]
    assert float(ask(served[0])) < 10
    assert float(ask(served[0], to=served[1].address)) < 10
    outside = subprocess.run(
        [sys.executable, "-c", CLIENT, served[1].address, "0", "0.3"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert outside.stdout.strip() in ("TimeoutError", "ConnectionRefusedError", "OSError")


def test_a_host_is_what_its_processes_take_for_their_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Hosts(2, names=["ada", "bob"]) as hosts:
        said = hosts[1].run(
            [sys.executable, "-c", "import os, socket; print(socket.gethostname(), os.getcwd())"],
            capture_output=True,
            text=True,
            check=True,
        )
    assert said.stdout.split() == ["bob", str(tmp_path)]


def test_private_folders_and_memory_are_each_hosts_own(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "own").mkdir()
    name = f"/dev/shm/paceline-test-{os.getpid()}"
    touch = ["touch", name, tmp_path / "own/file", tmp_path / "shared/file"]
    with Hosts(2, private_memory=True, private=[tmp_path / "own"]) as hosts:
        hosts[0].run(touch, check=True)
        for path in (name, tmp_path / "own/file"):
            assert not Path(path).exists()
            assert hosts[0].run(["test", "-e", path]).returncode == 0
            assert hosts[1].run(["test", "-e", path]).returncode == 1
        assert (tmp_path / "shared/file").exists()
        assert hosts[1].run(["test", "-e", tmp_path / "shared/file"]).returncode == 0


def test_a_cut_link_is_silent_and_heals(served):
    patient = CLIENT.replace('b".")', 'b".")\n        print(1, flush=True); input()', 1)
    waiting = served[0].popen(
        [sys.executable, "-c", patient, "host1", "0", "60"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with waiting:
        assert waiting.stdout.readline() == "1\n"  # connected
        served[1].cut()
        assert ask(served[0], timeout=1.0) in ("TimeoutError", "OSError")
        assert waiting.poll() is None  # nobody told it
        served[1].heal()
        out, _ = waiting.communicate("\n", timeout=60)  # its connection lives on
    assert float(out) < 60
    assert float(ask(served[0])) < 30


def test_delays_losses_and_rates_slow_a_link_down_until_taken_back(served):
    served[0].delay(100)
    assert float(ask(served[0])) >= 0.2  # there and back
    served[0].cut()
    assert ask(served[0], timeout=1.0) in ("TimeoutError", "OSError")
    served[0].heal()
    assert float(ask(served[0])) >= 0.2
    served[0].delay(0)
    served[0].drop(100)
    assert ask(served[0], timeout=1.0) in ("TimeoutError", "OSError")
    served[0].drop(0)
    served[0].rate(20)
    assert float(ask(served[0], size=2_000_000)) >= 0.6  # 16 Mbit, some of it from the bucket
    served[0].rate(None)
    assert min(float(ask(served[0], size=2_000_000)) for _ in range(5)) < 0.5
    with pytest.raises(ValueError, match="no such link"):
        served[0].drop(101)


def test_killing_a_host_ends_what_runs_on_it_and_nothing_else(served):
    sleeper = served[0].popen(["sleep", "600"])
    deadline = time.monotonic() + 30
    while not served[0].processes() and time.monotonic() < deadline:
        time.sleep(0.01)  # it enters the host only after it was started
    assert served[0].processes() == [sleeper.pid]
    served[0].kill()
    assert sleeper.wait(timeout=30) == -signal.SIGKILL
    assert served[0].processes() == []
    assert len(served[1].processes()) == 1
    assert ask(served[0]) != "ConnectionRefusedError"


def test_closing_ends_everything(tmp_path):
    with Hosts(2) as hosts:
        shell = "setsid sleep 600 & echo $!; wait"
        process = hosts[0].popen(["sh", "-c", shell], stdout=subprocess.PIPE, text=True)
        orphan = int(process.stdout.readline())
        hosts[1].delay(5)
    assert process.wait(timeout=30) == -signal.SIGKILL
    process.stdout.close()
    assert not is_alive(orphan)
    with pytest.raises(HostsUnavailable, match="closed"):
        hosts[0].run(["true"])
    hosts.close()  # once more does no harm


def test_a_killed_program_leaves_nothing_on_its_hosts():
    program = """
import time
from paceline.testing import Hosts
hosts = Hosts(2)
hosts[0].delay(5)
inside = [host.popen(["sh", "-c", "sleep 600 & wait"]) for host in hosts]
while [len(host.processes()) for host in hosts] != [2, 2]:
    time.sleep(0.01)
print(*(pid for host in hosts for pid in host.processes()), flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        inside = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(inside) == 4
    deadline = time.monotonic() + 60
    while any(map(is_alive, inside)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, inside))
