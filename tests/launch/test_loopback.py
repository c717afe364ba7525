"""A run on one machine has no listener that another machine could reach, however it is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from paceline.launch import environment
from paceline.launch.listening import is_loopback, listen
from paceline.launch.rendezvous.handler import LocalRendezvous
from paceline.testing.hosts import Hosts, hosts_available

PROGRAM = '''
import contextlib, io, json, sys, threading
sys.argv[0] = "paceline"

from paceline.launch.listening import is_loopback
from paceline.launch.loopback import _end

seen, kinds, over = set(), set(), threading.Event()

def look():
    """Everything that listens on this host, again and again."""
    while not over.wait(0.005):
        for name in ("tcp", "tcp6"):
            for line in open(f"/proc/self/net/{name}").readlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    address, _ = _end(fields[1])
                    (kinds if is_loopback(address) else seen).add((doing, address))

doing = ""
thread = threading.Thread(target=look)
thread.start()

import torch
from paceline.cli.app import app

class Sums(torch.utils.data.Dataset):
    def __len__(self): return 16
    def __getitem__(self, i): return torch.ones(4), torch.ones(1)

def start(*arguments):
    global doing
    doing = arguments[0]
    with contextlib.suppress(SystemExit):
        app(list(arguments), standalone_mode=False)

def fit():
    global doing
    doing = "fit"
    from paceline import Trainer
    model = torch.nn.Linear(4, 1)
    trainer = Trainer(model, loss=torch.nn.functional.mse_loss, global_batch=4,
                      optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.fit(Sums(), steps=1, nproc=2)

if __name__ == "__main__":
    try:
        start("train", "--nproc", "2", "--run-dir", "run", "--set", "train.steps=1",
              "--set", "schedule.warmup_steps=0", "--set", "launch.device=cpu")
        fit()
        start("bench", "comm", "--nproc", "2", "--device", "cpu", "--sizes", "1K",
              "--collectives", "all_reduce", "--seconds", "0.01", "--no-pairs")
        start("verify", "--layout", "dp=2", "--steps", "1")
    finally:
        over.set()
        thread.join()
    print("RESULT", json.dumps([sorted(seen), sorted({what for what, _ in kinds})]))
'''


@pytest.mark.skipif(hosts_available() is not None, reason=str(hosts_available()))
@pytest.mark.timeout(900)
def test_nothing_of_a_run_on_one_machine_is_open_to_others(tmp_path: Path) -> None:
    """On a host whose name has an address of the network, at which Gloo by itself would listen."""
    (tmp_path / "program.py").write_text(PROGRAM)
    with Hosts(1) as hosts:
        done = hosts[0].run(
            [sys.executable, "program.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=850,
        )
    result = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert result, done.stdout + done.stderr
    assert result[0] == 'RESULT [[], ["bench", "fit", "train", "verify"]]', done.stderr[-2000:]


def test_a_socket_listens_where_it_is_asked_to() -> None:
    for asked, found in (("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("::1", "::1")):
        with listen(asked, 0) as server:
            assert server.getsockname()[0] == found
    # A name may mean another address elsewhere, and an address may be that of a gateway.
    for everywhere in ("", "0.0.0.0", "some-name", "192.0.2.1"):
        with listen(everywhere, 0) as server:
            assert server.getsockname()[0] in ("::", "0.0.0.0")
    first = listen("127.0.0.1", 0)
    with first, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", first.getsockname()[1])


def test_the_store_of_the_ranks_of_one_machine_is_on_loopback() -> None:
    info = LocalRendezvous().next_rendezvous()
    port = info.bootstrap_store_info.master_port
    addresses = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                addresses.add(fields[1].partition(":")[0])
    assert addresses == {"0100007F"}


def test_what_the_user_chose_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert set(environment.loopback_interfaces().values()) == {"lo"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert environment.loopback_interfaces() == {"NCCL_SOCKET_IFNAME": "lo"}


def test_loopback_addresses_are_told_from_others() -> None:
    for address in ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost", "::1%lo"):
        assert is_loopback(address)
    for address in ("10.0.0.1", "node0", "", "::", "0.0.0.0", "fe80::1%eth0"):
        assert not is_loopback(address)
