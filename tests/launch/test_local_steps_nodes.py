"""Replicas that train alone, killed in the middle of a round, and in a world that changes."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from node_cases import Cluster, sizes, wait_for, worlds

from paceline.checkpoint.memory.find import OWN_MEMORY
from paceline.events import CheckpointSaved, Note, RestoreTried, RunFinished, StepDone

pytestmark = [pytest.mark.waits, pytest.mark.timeout(900)]

STEPS = 60


def settings(*pairs: str) -> Sequence[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def test_a_rank_killed_in_a_round_changes_nothing(tmp_path: Path) -> None:
    """Two ranks of one launcher: the state in memory is that of both replicas, in the round."""
    more = settings(
        "launch.nproc=2",
        "local_steps.every=20",
        "local_steps.overlap=3",
        "checkpoint.memory_every=3",
        "checkpoint.every=null",
        "checkpoint.every_minutes=null",
    )
    losses = []
    for name in ("undisturbed", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        with Cluster(folder, steps=STEPS, slow=name == "killed") as cluster:
            launcher = cluster.start(arguments=["sums.yaml", *more])
            if name == "killed":
                cluster.reaches(14)  # told 8 steps later: the ranks are between two meetings
                os.kill(launcher.ranks()[-1], signal.SIGKILL)
                wait_for(lambda c=cluster: worlds(c) == [2, 2], "the ranks to be started again")
                cluster.hurry()
            assert launcher.ends() == 0, cluster.outputs()
            losses.append(cluster.losses())
            if name == "killed":
                used = [event for event in cluster.of(RestoreTried) if event.ok]
                assert [event.rung for event in used] == [OWN_MEMORY], used
    assert losses[0] == losses[1]
    assert sorted(losses[0]) == list(range(1, STEPS + 1))


def test_replicas_come_and_go(tmp_path: Path) -> None:
    with Cluster(tmp_path, nnodes="1:2", more=settings("local_steps.every=10")) as cluster:
        first = cluster.start()
        cluster.reaches(1)
        second = cluster.start()
        wait_for(lambda: sizes(cluster) == [1, 2], "the second to be taken in")
        saved = len(cluster.of(CheckpointSaved))
        wait_for(lambda: len(cluster.of(CheckpointSaved)) > saved, "a checkpoint of both")
        second.send(signal.SIGKILL)
        wait_for(lambda: sizes(cluster) == [1, 2, 1], "the world without the second")
        cluster.reaches(cluster.step() + 2)
        third = cluster.start()
        wait_for(lambda: sizes(cluster) == [1, 2, 1, 2], "the third to be taken in")
        cluster.hurry()
        assert [first.ends(), third.ends()] == [0, 0], cluster.outputs()
        assert [event.reason for event in cluster.of(RunFinished)][-1] == "done"
        told = [event.message for event in cluster.of(Note)]
        assert any("1 replica before, 2 now" in message for message in told), told
        assert any("2 replicas before, 1 now" in message for message in told), told
        losses = cluster.losses()
        assert sorted(losses) == list(range(1, 401))
        samples = [event.samples for event in cluster.of(StepDone)]
        assert set(samples) == {8}
        assert losses[400] < losses[1] / 10
