"""Real processes, really killed: what is left in memory is whole, and is found."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from checkpoint.memory_cases import group, make_roots, recall, root_of, state
from paceline.checkpoint.memory.segment_files import folder_of, free_run, names_in
from paceline.checkpoint.memory.snapshots import MemorySnapshots
from paceline.errors import RankFailed
from ports import free_port

pytestmark = pytest.mark.waits

LARGE = 500_000


def train_until_killed(roots: list[str], after: int | None, notes: str) -> None:
    """Take snapshots without a pause; note which one is known to be whole on all ranks."""
    rank = dist.get_rank()
    tier = MemorySnapshots("run", group(), after=after, root=root_of(roots))
    handle = os.open(f"{notes}/{rank}", os.O_WRONLY | os.O_CREAT)
    for step in range((after or 0) + 1, 1_000_000):
        tier.snapshot(step, state(step, extra=LARGE), {"reason": "test"})
        os.pwrite(handle, f"{os.getpid():9d} {step - 1:9d}".encode(), 0)


class Killer(threading.Thread):
    """Kills some ranks with SIGKILL, some time after they are under way."""

    def __init__(self, notes: Path, victims: list[int], size: int, first: int, delay: float):
        super().__init__()
        self.notes, self.victims, self.size = notes, victims, size
        self.first, self.delay = first, delay
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + 150
        while time.monotonic() < deadline and not all(map(self.under_way, range(self.size))):
            time.sleep(0.001)
        time.sleep(self.delay)
        for rank in self.victims:
            os.kill(int((self.notes / str(rank)).read_text().split()[0]), signal.SIGKILL)

    def under_way(self, rank: int) -> bool:
        """Whether the snapshot of step ``first``, or a later one, is known to be whole."""
        note = self.notes / str(rank)
        words = note.read_text().split() if note.exists() else []
        return len(words) == 2 and int(words[1]) >= self.first


def whole_before(notes: Path) -> int:
    """The newest step that any rank knew to be whole everywhere when it died."""
    return max(int(note.read_text().split()[1]) for note in notes.iterdir())


def killed_and_restored(
    ranks: Any, roots: list[str], folder: Path, after: int | None, draw: random.Random, size: int
) -> tuple[int, str]:
    """Train on from ``after``, be killed at some instant, and restore: the step, and the rung."""
    notes = folder / f"notes-{draw.random()}"
    notes.mkdir()
    victims = draw.choice([[rank] for rank in range(size)] + [list(range(size))])
    lost = draw.choice([None, *roots]) if len(roots) > 1 else None
    # What is lost with a node is on its partner's again once there is one new snapshot.
    first = (after or 0) + 1 if lost is not None else max(after or 0, 1)
    killer = Killer(notes, victims, size, first, draw.uniform(0, 0.05))
    with pytest.raises(RankFailed):
        ranks(train_until_killed, roots, after, str(notes))
    killer.join()
    known = whole_before(notes)
    if lost is not None:  # the machine, not the process alone
        free_run("run", lost)
    found = ranks(recall, roots)
    assert found[0] is not None
    assert all(one[:2] == found[0][:2] for one in found)
    rung, step, _ = found[0]
    assert step >= known, f"step {known} was whole, and {step} was restored"
    return step, rung


@pytest.mark.world(2)
@pytest.mark.parametrize("nodes", [1, 2])
def test_killed_at_any_instant_the_newest_whole_snapshot_is_found(ranks, tmp_path, nodes):
    roots = make_roots(Path(tmp_path), nodes)
    draw = random.Random(nodes)
    after: int | None = None
    rungs = set()
    for _ in range(8):
        step, rung = killed_and_restored(ranks, roots, tmp_path, after, draw, 2)
        assert step >= (after or 1)
        after = step
        rungs.add(rung)
    assert rungs == ({"own memory"} if nodes == 1 else {"own memory", "partner memory"})
    for root in roots:
        assert len(names_in(folder_of("run", root))) <= 4


class Node:
    """A process with a /dev/shm of its own, which runs one rank at a time."""

    def __init__(self, number: int) -> None:
        self.number = number
        script = Path(__file__).with_name("memory_node.py")
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def tell(self, do: str, *arguments: Any, port: int = 0) -> None:
        place = f"RANK={self.number} WORLD_SIZE=2 GROUP_RANK={self.number} GROUP_WORLD_SIZE=2"
        place += f" LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
        environment = dict(pair.split("=") for pair in place.split())
        command = {"do": do, "with": arguments, "environment": environment}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def lose_power(self) -> None:
        """Nothing of it survives: no process, no memory."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    made = [Node(0), Node(1)]
    yield made
    for node in made:
        if node.process.poll() is None:
            node.lose_power()


def both(nodes: list[Node], do: str, *arguments: Any) -> list[str]:
    port = free_port()
    for node in nodes:
        node.tell(do, *arguments, port=port)
    return [node.hear() for node in nodes]


def test_two_nodes_die_one_way_after_the_other(nodes: list[Node]):
    assert [node.hear() for node in nodes] == ["ready"] * 2
    assert both(nodes, "train", None, 3) == ["partner 1", "partner 0"]
    assert both(nodes, "kill") == ["ended by 9"] * 2
    assert both(nodes, "restore") == ["own memory: step 3"] * 2

    assert both(nodes, "train", 3, 2) == ["partner 1", "partner 0"]
    nodes[1].lose_power()
    nodes[1] = Node(1)
    assert nodes[1].hear() == "ready"
    nodes[0].tell("kill")
    assert nodes[0].hear() == "ended by 9"
    assert both(nodes, "list")[1] == "empty"
    assert both(nodes, "restore") == ["partner memory: step 5"] * 2
    assert both(nodes, "list")[1] == "empty"

    assert both(nodes, "finish", 5) == ["freed"] * 2
    assert both(nodes, "list") == ["empty"] * 2
    assert both(nodes, "restore") == ["nothing"] * 2
    for node in nodes:
        node.close()
