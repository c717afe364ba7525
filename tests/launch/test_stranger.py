"""A stranger on the network of a run of two machines that has a secret: it joins nothing, reads
nothing, stops nothing and has nothing executed, and the run ends as if it had not been there."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_cases import CALM, Cluster, Launcher, worlds

from paceline.events import NodeJoined, NodeLeft, RankLost, Restarting
from paceline.launch.secret import make_secret
from paceline.testing.hosts import Host, Hosts, hosts_available

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(hosts_available() is not None, reason=str(hosts_available())),
    pytest.mark.timeout(900),
]
PORT = 29400
ATTACKS = Path(__file__).with_name("stranger_attacks.py")


@dataclasses.dataclass
class Scene:
    """Two hosts that train, a third one with a stranger, and what it would have executed."""

    hosts: Hosts
    cluster: Cluster
    launchers: list[Launcher]
    target: Path
    open_ports: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    def attack(self, name: str, *arguments: str) -> Any:
        """What came of an attack by the stranger."""
        done = self.hosts[2].run(
            [sys.executable, str(ATTACKS), name, *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "STRANGER_TARGET": str(self.target), "TORCH_CPP_LOG_LEVEL": "FATAL"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    def places(self) -> list[str]:
        """Everything that takes connections of strangers, as HOST:PORT."""
        return [f"{host}:{port}" for host, ports in self.open_ports.items() for port in ports]

    def goes_on(self) -> None:
        """The run has not been disturbed, and moves."""
        self.cluster.reaches(self.cluster.step() + 2)
        assert worlds(self.cluster) == [2], self.cluster.outputs()
        assert not self.target.exists(), "the stranger had something executed"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("stranger")
    make_secret(folder / "secret")
    make_secret(folder / "other-secret")
    with Hosts(3, names=["host0", "host1", "stranger"]) as hosts:
        rdzv = f"{hosts[0].address}:{PORT}"
        more = ["--secret-file", "secret"]
        # So slow that it is far from its end after all attacks, also on a busy machine.
        with Cluster(
            folder, nnodes="2", rdzv=rdzv, more=more, delay=0.25, node_timeout=CALM
        ) as cluster:
            launchers = [cluster.start(host) for host in hosts[:2]]
            cluster.reaches(1)
            found = Scene(hosts, cluster, launchers, folder / "executed")
            addresses = [host.address for host in hosts[:2]]
            found.open_ports = found.attack("scan", *addresses)
            yield found


def test_a_scan_finds_the_doors_of_the_tunnel_and_nothing_else(scene: Scene) -> None:
    """The rendezvous, the round's store and the keep-alive port; Gloo's sockets are sealed."""
    ports = {host: set(found) for host, found in scene.open_ports.items()}
    meeting, other = (host.address for host in scene.hosts[:2])
    assert PORT in ports[meeting]
    # Whoever came first is node 0, and serves the other two.
    rest = {meeting: ports[meeting] - {PORT}, other: ports[other]}
    assert sorted(map(len, rest.values())) == [0, 2], scene.open_ports
    scene.goes_on()


def test_no_bytes_get_through_without_the_certificate(scene: Scene) -> None:
    assert scene.attack("garbage", *scene.places())["sent"] > 100
    assert scene.attack("tls", *scene.places()) == {"got": 0}
    assert scene.attack("store", *scene.places()) == {"reached": 0}
    scene.goes_on()


def can_enter(host: Host, folder: Path, port: int) -> bool:
    """Whether a machine with the secret gets in at that port of node 0's machine."""
    code = (
        "import os, sys; from paceline.launch.secret import find_secret; "
        "from paceline.credentials import Secret; "
        "from paceline.launch.tunnel import Tunnel; "
        "t = Tunnel(find_secret(Secret('file:' + os.path.abspath('secret')))); t.probe(sys.argv[1], int(sys.argv[2]), 20); "
        "t.close()"
    )
    command = [sys.executable, "-c", code, "host0", str(port)]
    return host.run(command, cwd=folder, timeout=120).returncode == 0


def test_floods_and_connections_that_are_held_keep_nobody_out(scene: Scene) -> None:
    flood = scene.hosts[2].popen(
        [sys.executable, str(ATTACKS), "flood", *scene.places()], stdout=-3, stderr=-3
    )
    try:
        assert can_enter(scene.hosts[1], scene.cluster.folder, PORT)
        scene.goes_on()
    finally:
        assert flood.wait(120) == 0


def test_launchers_without_the_secret_do_not_join(scene: Scene) -> None:
    """One has another secret, one has none; both are told so, and nobody lets them in."""
    own = [
        *scene.cluster.arguments[: -len(["--secret-file", "secret"])],
        "--set",
        "launch.rejoin_timeout=8",  # enough for one handshake with a busy machine
    ]
    strangers = [
        scene.cluster.start(scene.hosts[2], [*own, "--secret-file", "other-secret"], "other"),
        scene.cluster.start(scene.hosts[2], own, "none"),
    ]
    assert [launcher.ends() for launcher in strangers] == [1, 1], scene.cluster.outputs()
    assert "has another secret" in strangers[0].text, strangers[0].text
    assert "without a secret" in strangers[1].text, "and it says what would be open"
    scene.goes_on()


def test_at_last_the_run_is_bitwise_what_it_is_undisturbed(scene: Scene, tmp_path: Path) -> None:
    with Cluster(tmp_path, nnodes="2", slow=False, node_timeout=CALM) as alone:
        both = [alone.start() for _ in range(2)]
        scene.cluster.hurry()
        assert [launcher.ends() for launcher in both] == [0, 0], alone.outputs()
        expected = alone.losses()
    assert [one.ends() for one in scene.launchers] == [0, 0], scene.cluster.outputs()
    assert scene.cluster.losses() == expected
    for kind in (RankLost, Restarting, NodeLeft, NodeJoined):
        assert scene.cluster.of(kind) == []
    assert not scene.target.exists()
    with contextlib.suppress(FileNotFoundError):
        assert "Traceback" not in scene.cluster.outputs()
