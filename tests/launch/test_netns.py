"""Two and three hosts in network namespaces, with real processes: killed, cut off, back, added."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from node_cases import CALM, NODE_TIMEOUT, Cluster, same_losses, sizes, wait_for, worlds

from paceline.events import NodeLeft, RanksStarted, StepDone
from paceline.testing.hosts import Hosts, hosts_available

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(hosts_available() is not None, reason=str(hosts_available())),
    pytest.mark.timeout(900),
]
PORT = 29400


def starts_again(cluster: Cluster, size: int, since: float) -> float:
    """Wait for a world of ``size`` to be started; how long that took from ``since`` on."""

    def after() -> list[RanksStarted]:
        return [event for event in cluster.of(RanksStarted) if event.time > since]

    changes = len(sizes(cluster)) - (worlds(cluster)[-1] == size)
    wait_for(lambda: sizes(cluster)[-1] == size and after(), f"a world of {size}")
    assert len(sizes(cluster)) == changes + 1, cluster.outputs()  # and of no other in between
    return next(event.time for event in after() if event.world_size == size) - since


def test_a_link_is_cut_and_healed(tmp_path: Path, undisturbed) -> None:
    with (
        Hosts(2) as hosts,
        Cluster(tmp_path, nnodes="1:2", rdzv=f"{hosts[0].address}:{PORT}") as cluster,
    ):
        first = cluster.start(hosts[0])
        cluster.reaches(1)
        second = cluster.start(hosts[1])
        wait_for(lambda: sizes(cluster) == [1, 2], "the second host to be taken in")
        cluster.reaches(cluster.step() + 2)
        hosts[1].cut()
        took = starts_again(cluster, 1, since=time.time())
        assert took > NODE_TIMEOUT / 2, "nobody can know at once that a link was cut"
        cluster.reaches(cluster.step() + 2)
        hosts[1].heal()
        starts_again(cluster, 2, since=time.time())
        cluster.hurry()
        assert [first.ends(), second.ends()] == [0, 0], cluster.outputs()
        same_losses(cluster.losses(), undisturbed)
        assert [event.host for event in cluster.of(NodeLeft)] == ["host1"]


def test_hosts_die_are_added_and_the_meeting_moves_to_a_stand_in(
    tmp_path: Path, undisturbed
) -> None:
    with Hosts(3) as hosts:
        rdzv = f"{hosts[0].address}:{PORT},{hosts[1].address}:{PORT}"
        with Cluster(tmp_path, nnodes="2:3", rdzv=rdzv) as cluster:
            cluster.start(hosts[0])
            second, third = cluster.start(hosts[1]), cluster.start(hosts[2])
            wait_for(lambda: worlds(cluster)[-1:] == [3], "all three")
            cluster.reaches(cluster.step() + 2)
            hosts[2].cut()  # a power failure: it is gone and says nothing
            hosts[2].kill()
            third.ends()
            starts_again(cluster, 2, since=time.time())
            cluster.reaches(cluster.step() + 2)
            hosts[2].heal()
            third = cluster.start(hosts[2])
            starts_again(cluster, 3, since=time.time())
            cluster.reaches(cluster.step() + 2)
            hosts[0].cut()  # it served the meeting, and the round
            hosts[0].kill()
            starts_again(cluster, 2, since=time.time())
            cluster.reaches(cluster.step() + 2)
            back = cluster.start(hosts[0])
            hosts[0].heal()
            starts_again(cluster, 3, since=time.time())
            cluster.hurry()
            ends = [second.ends(), third.ends(), back.ends()]
            assert ends == [0, 0, 0], cluster.outputs()
            same_losses(cluster.losses(), undisturbed)


def test_hosts_that_share_no_disk(tmp_path: Path) -> None:
    runs, shared = tmp_path / "runs", tmp_path / "shared"
    runs.mkdir()
    shared.mkdir()
    with (
        Hosts(2, private=[runs]) as hosts,
        Cluster(
            tmp_path,
            nnodes="2",
            rdzv=f"{hosts[0].address}:{PORT}",
            slow=False,
            node_timeout=CALM,
        ) as cluster,
    ):
        refused = [cluster.start(host) for host in hosts]
        assert all(launcher.ends() != 0 for launcher in refused), cluster.outputs()
        assert any("checkpoint.where" in launcher.text for launcher in refused)
        where = ["--set", f"checkpoint.where={shared}"]
        both = [cluster.start(host, [*cluster.arguments, *where]) for host in hosts]
        assert [launcher.ends() for launcher in both] == [0, 0], cluster.outputs()
        main = next(h for h, made in zip(hosts, both, strict=True) if "node 0 of" in made.text)
        found = main.run(["find", runs, "-name", "*.log"], capture_output=True, text=True).stdout
        assert "node0-" in found
        assert "node1-" in found, "the other node's logs are copied to node 0"
        written = main.run(["grep", "-c", StepDone.__name__, "-r", runs], capture_output=True)
        assert b"400" in written.stdout
        assert list(shared.glob("step-*"))


def test_a_host_that_dies_takes_no_rank_along(tmp_path: Path) -> None:
    """Killed without a word to anybody, while its link stays up: the ranks must be gone."""
    with (
        Hosts(2) as hosts,
        Cluster(tmp_path, nnodes="1:2", rdzv=f"{hosts[0].address}:{PORT}") as cluster,
    ):
        cluster.start(hosts[0])
        second = cluster.start(hosts[1])
        wait_for(lambda: worlds(cluster)[-1:] == [2], "both")
        cluster.reaches(cluster.step() + 1)
        killed = time.time()
        second.send(signal.SIGKILL)
        wait_for(lambda: not hosts[1].processes(), "the ranks of the killed launcher to end")
        starts_again(cluster, 1, since=killed)
