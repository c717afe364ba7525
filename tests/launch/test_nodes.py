"""Several launchers on one machine, with real processes: what each of them sees of the others."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from node_cases import CALM, Cluster, same_losses, sizes, wait_for, worlds

from paceline.events import NodeJoined, NodeLeft, Restarting, RunFinished

pytestmark = [pytest.mark.waits, pytest.mark.timeout(900)]


def test_two_launchers_are_one_run_and_start_again_together(tmp_path: Path, undisturbed) -> None:
    with Cluster(tmp_path, nnodes="2", node_timeout=CALM) as cluster:
        first, second = cluster.start(), cluster.start()
        cluster.reaches(8)
        os.kill(second.ranks()[0], signal.SIGKILL)
        wait_for(lambda: worlds(cluster) == [2, 2], "the ranks to be started again")
        cluster.hurry()
        assert [first.ends(), second.ends()] == [0, 0], cluster.outputs()
        same_losses(cluster.losses(), undisturbed)
        assert [event.reason for event in cluster.of(Restarting)] == ["failure"]
        assert [event.reason for event in cluster.of(RunFinished)] == ["done"]
        logs = {path.parent.name for path in (cluster.run / "logs").glob("*/rank*.log")}
        assert sorted(name.partition("-")[0] for name in logs) == ["node0", "node1"]
        shown = [launcher for launcher in (first, second) if "step 400/400" in launcher.text]
        other = next(launcher for launcher in (first, second) if launcher not in shown)
        assert len(shown) == 1, "the progress is shown on node 0 alone"
        assert "node 1 of 2" in other.text
        assert str(cluster.run) in other.text


def test_a_killed_launcher_is_lost_and_one_that_comes_is_taken_in(
    tmp_path: Path, undisturbed
) -> None:
    with Cluster(tmp_path, nnodes="1:2") as cluster:
        first = cluster.start()
        cluster.reaches(1)
        second = cluster.start()
        wait_for(lambda: sizes(cluster) == [1, 2], "the second to be taken in")
        cluster.reaches(cluster.step() + 2)
        second.send(signal.SIGKILL)
        wait_for(lambda: sizes(cluster) == [1, 2, 1], "the world without the second")
        third = cluster.start()
        wait_for(lambda: sizes(cluster) == [1, 2, 1, 2], "the third to be taken in")
        cluster.hurry()
        assert [first.ends(), third.ends()] == [0, 0], cluster.outputs()
        same_losses(cluster.losses(), undisturbed)
        assert [event.reason for event in cluster.of(NodeLeft)] == ["lost"]
        assert len(cluster.of(NodeJoined)) == 2


def test_a_launcher_that_was_stopped_comes_back(tmp_path: Path, undisturbed) -> None:
    with Cluster(tmp_path, nnodes="1:2") as cluster:
        first = cluster.start()
        cluster.reaches(1)
        second = cluster.start()
        wait_for(lambda: sizes(cluster) == [1, 2], "the second to be taken in")
        cluster.reaches(cluster.step() + 1)
        frozen = [second.process.pid, *second.ranks()]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: sizes(cluster) == [1, 2, 1], "the world without the second")
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        wait_for(lambda: sizes(cluster) == [1, 2, 1, 2], "the second to be back")
        cluster.hurry()
        assert [first.ends(), second.ends()] == [0, 0], cluster.outputs()
        same_losses(cluster.losses(), undisturbed)


def test_sigterm_takes_one_machine_away_and_ctrl_c_ends_the_run(tmp_path: Path) -> None:
    with Cluster(tmp_path, steps=10_000, nnodes="1:3", node_timeout=CALM) as cluster:
        first, second, third = cluster.start(), cluster.start(), cluster.start()
        wait_for(lambda: worlds(cluster)[-1:] == [3], "all three")
        cluster.reaches(cluster.step() + 2)
        second.send(signal.SIGTERM)
        assert second.ends() == 143, cluster.outputs()
        wait_for(lambda: worlds(cluster)[-1] == 2, "the other two")
        cluster.reaches(cluster.step() + 2)
        assert [event.reason for event in cluster.of(NodeLeft)] == ["preempted"]
        third.send(signal.SIGINT)
        assert third.ends() == 130, cluster.outputs()
        assert first.ends() != 0
        assert "Ctrl-C" in first.text, first.text
