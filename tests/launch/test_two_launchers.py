"""Launchers of two nodes that form a world: what one of them finds, both act on.

The nodes are threads of this process, and the place they meet at is a list; see ``test_nodes.py``
for real ones.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from paceline.errors import LaunchError, RankFailed
from paceline.events import Event, RankLost, RanksStarted, Restarting
from paceline.launch.job import LocalJob
from paceline.launch.local import launch
from paceline.launch.rendezvous.handler import LauncherRendezvous
from paceline.launch.restart_policy import RestartLimits


class Table:
    """Where nodes meet: a world forms as soon as ``size`` of them are there."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.waiting: list[str] = []
        self.worlds: list[tuple[TCPStore, list[str]]] = []
        self.events: list[Event] = []
        self.closed: str | None = None
        self.changed = threading.Condition()


class Seat(LauncherRendezvous):
    """The table as one node sees it."""

    patience = 30.0

    def __init__(self, table: Table, host: str, store: type[PrefixStore] = PrefixStore) -> None:
        self.table, self.host, self.nodes_now, self.store = table, host, [host], store

    @property
    def nodes(self) -> list[str]:
        return self.nodes_now

    def next_rendezvous(self) -> RendezvousInfo:
        table = self.table
        with table.changed:
            before = len(table.worlds)
            table.waiting = sorted([*table.waiting, self.host])
            if len(table.waiting) == table.size:
                server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                table.worlds.append((server, table.waiting))
                table.waiting = []
                table.changed.notify_all()
            table.changed.wait_for(lambda: len(table.worlds) > before or table.closed, 240)
            if table.closed is not None:
                raise RendezvousClosedError(table.closed)
            server, self.nodes_now = table.worlds[-1]
        client = self.store("agent", TCPStore("127.0.0.1", server.port))
        place = RendezvousStoreInfo("127.0.0.1", server.port)
        return RendezvousInfo(client, self.nodes.index(self.host), len(self.nodes), place)

    def num_nodes_waiting(self) -> int:
        return len(self.table.waiting)

    def lost(self) -> str | None:
        return self.table.closed

    def post(self, event: Event) -> None:
        self.table.events.append(event)

    def leave(self, reason: str) -> None:
        raise AssertionError("no node leaves in these tests")

    def close_for_all(self, reason: str) -> None:
        with self.table.changed:
            self.table.closed = reason
            self.table.changed.notify_all()

    def stop_waiting(self) -> None:
        raise AssertionError("no node is stopped in these tests")

    def get_backend(self) -> str:
        return "table"

    def get_run_id(self) -> str:
        return "test"

    def is_closed(self) -> bool:
        return self.table.closed is not None

    def set_closed(self) -> None:
        self.close_for_all("closed")

    def shutdown(self) -> bool:
        return True


def node(
    table: Table, host: str, folder: Path, usable_ranks: Callable[[int], int] | None = None
) -> LocalJob:
    return LocalJob(
        ["script", str(folder / "script.py"), str(folder)],
        nproc=1,
        log_dir=folder / "logs",
        limits=RestartLimits(max_restarts=2),
        rendezvous=lambda: Seat(table, host),
        host=host,
        usable_ranks=usable_ranks,
        output=None,
        notice=lambda message: None,
    )


def kinds(table: Table, kind: type[Event]) -> list[Event]:
    return [event for event in table.events if isinstance(event, kind)]


SECOND_DIES = """
import os, signal, sys, time
up = os.path.join(sys.argv[1], "up")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        while not os.path.exists(up): time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    open(up, "w").close()
    time.sleep(600)  # hears nothing of the other rank
"""


def test_a_rank_that_dies_on_one_node_is_a_restart_on_both(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SECOND_DIES)
    table = Table(2)
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(launch, node(table, host, tmp_path)) for host in "ab"]:
            done.result()
    starts = kinds(table, RanksStarted)
    assert [(e.world_size, e.nodes) for e in starts] == [(2, ["a", "b"])] * 2  # type: ignore[attr-defined]
    (lost,) = kinds(table, RankLost)
    assert isinstance(lost, RankLost)
    assert (lost.rank, lost.host, lost.exit_code) == (1, "b", -9)
    (again,) = kinds(table, Restarting)
    assert isinstance(again, Restarting)
    assert (again.reason, again.used, again.budget) == ("failure", 1, 2)
    found = sorted(str(path.relative_to(tmp_path / "logs")) for path in tmp_path.rglob("*.log"))
    assert found == [
        "node0-a/attempt1/rank0.log",
        "node0-a/rank0.log",
        "node1-b/attempt1/rank1.log",
        "node1-b/rank1.log",
    ]


SECOND_IS_WRONG = """
import os, time
from paceline.errors import ConfigError
if os.environ["RANK"] == "1":
    raise ConfigError("a typo")
time.sleep(600)
"""


def test_both_give_up_and_say_why(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SECOND_IS_WRONG)
    table = Table(2)
    with ThreadPoolExecutor() as pool:
        outcomes = [pool.submit(launch, node(table, host, tmp_path)) for host in "ab"]
        errors = [outcome.exception() for outcome in outcomes]
    for error in errors:
        assert isinstance(error, RankFailed)
        assert (error.rank, error.exit_code) == (1, 1)
        assert str(error).startswith("Rank 1 of 2 on b failed: paceline.errors.ConfigError: a typo")
    assert table.closed == "ConfigError does not go away by itself"


LEAVES_WHEN_ASKED = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(143))
Path(sys.argv[1], "up").touch()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(600)
"""


def test_a_node_that_joins_and_has_no_place_stands_by_until_the_end(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LEAVES_WHEN_ASKED)
    table = Table(1)
    with ThreadPoolExecutor() as pool:
        outcomes: list[Future[None]] = []
        outcomes.append(pool.submit(launch, node(table, "a", tmp_path, usable_ranks=lambda n: 1)))
        deadline = time.monotonic() + 240
        while not (tmp_path / "up").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        table.size = 2
        outcomes.append(pool.submit(launch, node(table, "b", tmp_path, usable_ranks=lambda n: 1)))
        for outcome in outcomes:
            outcome.result()
    first, second = kinds(table, RanksStarted)
    assert isinstance(first, RanksStarted)
    assert isinstance(second, RanksStarted)
    assert (first.nodes, first.world_size, first.idle) == (["a"], 1, 0)
    assert (second.nodes, second.world_size, second.idle) == (["a", "b"], 1, 1)
    (again,) = kinds(table, Restarting)
    assert isinstance(again, Restarting)
    assert (again.reason, again.detail) == ("node_joined", "1 node waits to join")
    assert (again.used, again.budget) == (0, None)
    assert table.closed == "the run is done"


class ReadsNothing(PrefixStore):
    """A connection that is too slow for its launcher to read whether others are done."""

    def check(self, keys: list[str]) -> bool:
        return False

    def clone(self) -> ReadsNothing:
        return self


def test_that_a_run_is_done_is_no_failure_for_who_reads_it_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.launch.agent._EXIT_BARRIER_SECONDS", 0.5)
    (tmp_path / "script.py").write_text("")
    table = Table(2)
    first = node(table, "a", tmp_path)
    slow = dataclasses.replace(
        node(table, "b", tmp_path), rendezvous=lambda: Seat(table, "b", ReadsNothing)
    )
    with ThreadPoolExecutor() as pool:
        for outcome in [pool.submit(launch, first), pool.submit(launch, slow)]:
            outcome.result()
    assert table.closed == "the run is done"
    # Torch logs the barrier that one left early, with a traceback whose frames hold the table.
    table.worlds.clear()


def test_who_comes_when_all_is_over_is_told_so(tmp_path: Path) -> None:
    table = Table(2)
    table.closed = "the run is done"
    with pytest.raises(LaunchError, match=r"^the run is over: the run is done\.$"):
        launch(node(table, "b", tmp_path))
