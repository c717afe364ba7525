"""What launchers of one world exchange: all of them act on the same outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from paceline.events import GaveUp, RankLost, Restarting, RunFailed
from paceline.launch.environment import ranks_per_node
from paceline.launch.outcome import WorldOutcome, interrupted
from paceline.launch.outcome_store import NodeHistory, OutcomeStore
from paceline.launch.restart_policy import Decision, Ending

FAILED = Ending("failure", "ValueError: no", step=3, raised="ValueError", moved=True, seconds=2.5)
AGAIN = Decision(True, 2.0, "failure", used=2, budget=3)
OVER = Decision(False, 0.0, "launch.max_restarts is 0")


@pytest.fixture
def launchers() -> Iterator[list[OutcomeStore]]:
    """Those of two nodes, each with a connection of its own to the round store."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seconds = timedelta(seconds=120)
    clients = [TCPStore("127.0.0.1", server.port, timeout=seconds) for _ in range(2)]
    found = [OutcomeStore(PrefixStore("agent", c), node, 2) for node, c in enumerate(clients)]
    yield found
    for outcomes in found:
        outcomes.close()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_first_outcome_counts_for_all(launchers: list[OutcomeStore]) -> None:
    first, second = launchers
    for launcher in launchers:
        launcher.watch([0, 1])
    mine = WorldOutcome(
        FAILED, AGAIN, "host-a", rank=1, exit_code=1, log="rank1.log", report="text"
    )
    assert first.outcome() is None
    assert first.agree(mine) is mine
    late = WorldOutcome(Ending("node_lost", "host-a is gone"), AGAIN, "host-b")
    assert second.agree(late) == mine, "it was too late with its own"
    assert first.agree(late) is mine, "there is one already"
    assert second.outcome() == mine


def test_others_hear_of_an_outcome_without_asking(launchers: list[OutcomeStore]) -> None:
    first, second = launchers
    second.watch([0, 1])
    first.agree(WorldOutcome(FAILED, OVER, "host-a"))
    wait_until(second.outcome)
    assert second.outcome() == WorldOutcome(FAILED, OVER, "host-a")


def test_a_world_is_done_when_all_nodes_with_ranks_are(launchers: list[OutcomeStore]) -> None:
    first, idle = launchers
    first.watch([0])
    idle.watch([0])
    assert not idle.all_done()
    first.mark_done()
    assert first.all_done()
    wait_until(idle.all_done)


class ConnectionThatBreaks(PrefixStore):
    """Dead at its first use, as one is whose answer came too late; so is its first clone."""

    def __init__(self, port: int) -> None:
        self.port, self.clones = port, 0
        super().__init__("agent", TCPStore("127.0.0.1", port))

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("did not answer")

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("did not answer")

    def clone(self) -> PrefixStore:
        self.clones += 1
        if self.clones == 1:
            return ConnectionThatBreaks(self.port)
        return PrefixStore("agent", TCPStore("127.0.0.1", self.port))


def test_a_connection_that_breaks_hides_nothing_from_a_launcher() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = (OutcomeStore(ConnectionThatBreaks(server.port), node, 2) for node in range(2))
    second.watch([0, 1])
    for launcher in (first, second):
        for _ in range(2):  # as the agent does with every look
            launcher.mark_done()
    wait_until(second.all_done)
    second.close()


def test_a_world_without_any_rank_is_never_done() -> None:
    alone = OutcomeStore(None, 0, 1)
    alone.watch([])
    assert not alone.all_done()


def test_launchers_hear_who_the_others_are(launchers: list[OutcomeStore]) -> None:
    members = [NodeHistory(2, 3, [FAILED]), NodeHistory(4, 0)]
    launchers[1]._store.set("member/1", members[1].to_json())
    assert launchers[0].exchange(members[0]) == members


def test_one_node_needs_no_store() -> None:
    alone = OutcomeStore(None, 0, 1)
    assert alone.exchange(NodeHistory(2, 0)) == [NodeHistory(2, 0)]
    alone.watch([0])
    outcome = WorldOutcome(FAILED, AGAIN, "here")
    assert alone.agree(outcome) is outcome
    assert alone.outcome() is outcome
    alone.mark_done()
    assert alone.all_done()


@pytest.mark.parametrize(
    ("nprocs", "used", "parts"),
    [
        ([2, 2], 4, [2, 2]),
        ([2, 2], 3, [2, 1]),
        ([2, 2, 2], 2, [2, 0, 0]),
        ([1, 4], 3, [1, 2]),
        ([2], 0, [0]),
    ],
)
def test_the_lowest_ranks_are_used(nprocs: list[int], used: int, parts: list[int]) -> None:
    assert ranks_per_node(nprocs, used) == parts


def test_more_ranks_than_there_are_cannot_be_used() -> None:
    with pytest.raises(ValueError, match="5 ranks cannot be used of a world of 4"):
        ranks_per_node([2, 2], 5)


def test_what_is_told_of_a_restart() -> None:
    outcome = WorldOutcome(FAILED, AGAIN, "host-a", rank=1, exit_code=1, log="logs/rank1.log")
    lost, again = outcome.events()
    assert isinstance(lost, RankLost)
    assert (lost.rank, lost.host, lost.cause, lost.step) == (1, "host-a", "failed", 3)
    assert isinstance(again, Restarting)
    assert (again.reason, again.delay, again.used, again.budget) == ("failure", 2.0, 2, 3)
    assert outcome.restart_notice() == (
        "rank 1 failed (ValueError: no); all ranks are started again in 2 s, restart 2 of 3. "
        "Its log: logs/rank1.log"
    )


def test_what_is_told_when_it_is_over() -> None:
    kinds = [type(e) for e in WorldOutcome(FAILED, OVER, "a", rank=1, exit_code=1).events()]
    assert kinds == [RankLost, GaveUp, RunFailed]
    why = interrupted("host-a")
    stopped = WorldOutcome(Ending("preemption", why), Decision(False, 0.0, why), "host-a")
    assert stopped.events() == [], "the ranks have said so themselves"
    assert str(stopped.to_error()) == "the run is over: it was stopped by Ctrl-C on host-a."
