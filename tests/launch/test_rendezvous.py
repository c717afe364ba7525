"""How launchers meet: what they agree on, who lives, what is told; without ranks, in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_cases import PATIENCE, wait_for
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

from paceline.config.endpoints import Endpoint
from paceline.errors import ConfigError, LaunchError
from paceline.events import Event, NodeJoined, NodeLeft, Note
from paceline.launch.logs import LogName
from paceline.launch.messages import encode
from paceline.launch.rendezvous import endpoints as rendezvous_endpoints
from paceline.launch.rendezvous import forwarding, joining
from paceline.launch.rendezvous.announcing import WaitingNodes
from paceline.launch.rendezvous.endpoints import RendezvousEndpoints
from paceline.launch.rendezvous.forwarding import EventForwarder, LogTail
from paceline.launch.rendezvous.handler import WaitingStopped
from paceline.launch.rendezvous.joining import NotTheSameRun, RendezvousSettings, RunHooks
from paceline.launch.rendezvous.membership import NodeMember, RunInfo, agree, gone, joined
from paceline.launch.rendezvous.multi_node import MultiNodeRendezvous
from paceline.launch.rendezvous.node_heartbeats import HeartbeatTracker
from paceline.launch.rendezvous.records import CurrentWorld
from paceline.launch.rendezvous.stores import (
    StoreConnection,
    StoreRefused,
    StoreUnreachable,
    let_calls_end,
    serve,
    serve_rendezvous,
)
from paceline.launch.secret import RunSecret
from ports import free_port

TIMEOUT = 10.0


def member(name: str, **facts: Any) -> NodeMember:
    return NodeMember(id=name, host=name, address="10.0.0.1", nproc=1, arrival=0, **facts)


# What follows from what launchers say of themselves.


def test_node_0_stays_node_0_and_newcomers_follow_in_the_order_they_came() -> None:
    run = RunInfo("/runs/x", "abc")
    old = [member(name, round=3, node=i, run=run) for i, name in enumerate(["z", "y"])]
    new = [dataclasses.replace(member(n), arrival=a) for n, a in (("a", 9), ("b", 8))]
    world = agree([*new, *old])
    assert world.hosts == ["z", "y", "b", "a"]
    assert (world.run, world.round) == (run, 4)


def test_the_run_of_the_latest_world_is_the_one_that_goes_on() -> None:
    stale = member("stale", round=2, node=0, run=RunInfo("/runs/old", "1"))
    fresh = member("fresh", round=5, node=1, run=RunInfo("/runs/new", "2"))
    world = agree([stale, fresh, member("newcomer")])
    assert world.run == RunInfo("/runs/new", "2")
    assert world.round == 6


def test_who_left_and_who_joined() -> None:
    first = member("a", round=0, node=0, peers={"a": "a", "b": "b"})
    world = agree([first, member("c")])
    assert gone(world) == {"b": "b"}
    assert joined(world) == ["c"]
    assert joined(agree([member("a"), member("b")])) == [], "the first world is nobody's addition"


def test_the_machine_that_serves_the_meeting_is_where_the_others_found_it() -> None:
    server = dataclasses.replace(
        member("server"),
        address="127.0.1.1",
        rendezvous_address="127.0.1.1",
        serves_rendezvous=True,
    )
    other = dataclasses.replace(member("other"), address="10.0.0.2", rendezvous_address="10.0.0.1")
    assert agree([server, other]).members[1].address == "10.0.0.1"
    stranger = dataclasses.replace(server, serves_rendezvous=False)
    with pytest.raises(LaunchError, match=r"server reaches .* loopback address 127.0.1.1"):
        agree([stranger, other])


def test_a_node_is_silent_when_its_count_stands_still() -> None:
    beats = HeartbeatTracker(nodes=3, own=0, timeout=10, now=0)
    beats.note([1, 1, 1], now=5)
    beats.note([2, 1, 2], now=12)
    assert beats.silent(now=14) == []
    assert beats.silent(now=15.5) == [1]
    beats.note([2, 2, 2], now=16)
    assert beats.silent(now=17) == []
    assert beats.silent(now=99) == [1, 2], "never ourselves"


def test_less_patience_with_a_node_whose_connection_broke() -> None:
    beats = HeartbeatTracker(nodes=3, own=0, timeout=10, now=0)
    beats.note_disconnected({1})
    beats.note([1, 1, 1], now=5)
    assert beats.silent(now=7) == [], "a connection may break for other reasons"
    assert beats.silent(now=8) == [1]
    beats.note([1, 2, 1], now=9)
    assert beats.silent(now=10) == [], "it lives"


def test_newcomers_that_went_away_do_not_count() -> None:
    waiters = WaitingNodes(timeout=10)
    assert waiters.count([1, 1], now=0) == 2
    assert waiters.count([1, 5], now=9) == 2
    assert waiters.count([1, 9], now=11) == 1
    assert waiters.count([0, 9], now=30) == 0


# News.


class LocalConnection:
    """A connection to a store in this process."""

    def __init__(self) -> None:
        self.store = HashStore()

    def call(self, operation: Any) -> Any:
        return operation(self.store)


def test_events_reach_the_one_who_writes_once_through_a_round_that_ends_early() -> None:
    written: list[Event] = []
    main = EventForwarder(written.append, lambda *_: None)
    other = EventForwarder(lambda _: pytest.fail("only node 0 writes"), lambda *_: None)
    connection: Any = LocalConnection()
    other.post(Note(message="a"), is_main=False)
    other.exchange(connection, is_main=False)
    main.exchange(connection, is_main=True)
    other.post(Note(message="b"), is_main=False)
    other.exchange(connection, is_main=False)
    connection = LocalConnection()  # the round ended before node 0 took b
    for forwarder in (main, other):
        forwarder.new_round()
    for _ in range(2):
        other.exchange(connection, is_main=False)
        main.exchange(connection, is_main=True)
    assert [event.message for event in written if isinstance(event, Note)] == ["a", "b"]


def test_what_several_launchers_find_out_by_themselves_is_told_once() -> None:
    written: list[Event] = []
    main, other = (
        EventForwarder(written.append, lambda *_: None),
        EventForwarder(lambda _: None, lambda *_: None),
    )
    connection: Any = LocalConnection()
    for forwarder in (main, other):
        forwarder.post(
            Note(message="node 2 is lost"), is_main=forwarder is main, identity="round 1"
        )
        forwarder.post(Note(message="something else"), is_main=forwarder is main)
    other.exchange(connection, is_main=False)
    main.exchange(connection, is_main=True)
    told = [event.message for event in written if isinstance(event, Note)]
    assert told == ["node 2 is lost", "something else", "something else"]


def test_logs_are_sent_in_pieces_and_too_much_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "LOG_BYTES_AT_ONCE", 10)
    monkeypatch.setattr(forwarding, "LOG_BYTES_BEHIND", 30)
    kept: dict[str, bytes] = {}

    def keep(name: LogName, host: str, data: bytes) -> None:
        path = str(name.path(Path(), host))
        kept[path] = kept.get(path, b"") + data

    main, other = EventForwarder(lambda _: None, keep), EventForwarder(lambda _: None, keep)
    for node, forwarder in enumerate((main, other)):
        forwarder.new_round(["a", "b"], node)
    other.logs = LogTail(tmp_path, "b")
    log = tmp_path / "node1-b" / "rank1.log"
    log.parent.mkdir()
    connection: Any = LocalConnection()

    def exchange(times: int) -> None:
        for _ in range(times):
            other.exchange(connection, is_main=False)
            main.exchange(connection, is_main=True)

    log.write_bytes(b"0123456789abcdef")
    exchange(3)
    assert kept == {"node1-b/rank1.log": b"0123456789abcdef"}
    with open(log, "ab") as file:
        file.write(b"x" * 50 + b"the end...")
    exchange(3)
    text = kept["node1-b/rank1.log"].decode()
    assert "[50 bytes left out" in text
    assert text.endswith("the end...")


# Lines.


def test_a_store_that_does_not_answer_is_lost_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        began = time.monotonic()
        with pytest.raises(StoreUnreachable, match="did not answer"):
            StoreConnection("127.0.0.1", silent.getsockname()[1], patience=0.5)
        assert time.monotonic() - began < 60


def test_a_store_that_is_gone_is_known_at_once_and_a_missing_key_is_no_lost_line() -> None:
    server = serve("127.0.0.1", free_port())
    connection = StoreConnection("127.0.0.1", server.port, patience=2)
    assert connection.call(lambda store: store.add("count", 2)) == 2
    with pytest.raises(KeyError):
        connection.call(lambda store: store.get("missing"))
    assert connection.call(lambda store: store.add("count", 1)) == 3
    port = server.port
    connection.close()
    with pytest.raises(StoreUnreachable):
        connection.call(lambda store: store.add("count", 1))
    del server
    with pytest.raises(StoreRefused):
        StoreConnection("127.0.0.1", port, patience=2)


def test_python_ends_after_the_last_call_to_a_store() -> None:
    """One that comes back while Python shuts down would abort the process."""
    server = serve("127.0.0.1", free_port())
    connection = StoreConnection("127.0.0.1", server.port, patience=60)
    begun, answered = threading.Event(), threading.Event()

    def call(store: Any) -> None:
        begun.set()
        answered.wait(60)

    thread = threading.Thread(target=connection.call, args=(call,))
    thread.start()
    assert begun.wait(60)
    threading.Timer(0.2, answered.set).start()
    let_calls_end()
    assert answered.is_set()
    thread.join()
    connection.close()


def test_the_second_candidate_waits_its_turn_and_then_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous_endpoints, "TURN_SECONDS", 1.0)
    monkeypatch.setattr(rendezvous_endpoints, "is_this_machine", lambda host: host == "localhost")
    absent, own = Endpoint("127.0.0.1", free_port()), Endpoint("localhost", free_port())
    endpoints = RendezvousEndpoints([absent, own], patience=30)
    began = time.monotonic()
    records = endpoints.find(began + 120, lambda: None)
    assert endpoints.serves
    assert time.monotonic() - began >= 1.0
    records.connection.close()
    # The first one is back, and its world is the later one: ours is given up.
    server = serve_rendezvous(absent.host, absent.port)
    current = CurrentWorld("w", 1, 4, ["a"], {}, RunInfo("/runs/x", "x"))
    server.store.set("run0/current", encode(current))
    found = endpoints.find(time.monotonic() + 120, lambda: None)
    assert found.current() is not None
    assert not endpoints.serves
    found.connection.close()


# Whole rendezvous.


class Launcher:
    """A launcher without ranks: it meets, and meets again whenever its world is over."""

    def __init__(
        self,
        name: str,
        settings: RendezvousSettings,
        take: Callable[[RunInfo], None] | None = None,
    ) -> None:
        self.name = name
        self.written: list[Event] = []
        self.notices: list[str] = []
        self.taken: list[RunInfo] = []
        self.worlds: list[list[str]] = []
        self.error: BaseException | None = None
        hooks = RunHooks(
            make=lambda: RunInfo(f"/runs/{name}", name),
            take=take or self.taken.append,
            write=self.written.append,
            keep_log=lambda *_: None,
            notice=self.notices.append,
        )
        self.rendezvous = MultiNodeRendezvous(settings, hooks)
        self.rendezvous.joiner.host = name
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"test-{name}")
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                info = self.rendezvous.next_rendezvous()
                info.store.set(f"hello/{info.rank}", "")  # what agents do, too
                self.worlds.append(self.rendezvous.nodes)
                while not self._over():
                    time.sleep(0.05)
        except BaseException as error:
            self.error = error

    def _over(self) -> bool:
        rendezvous = self.rendezvous
        over = rendezvous.lost() is not None or rendezvous.num_nodes_waiting() > 0
        return over or self._ended.is_set()

    def end(self) -> None:
        self._ended.set()
        self.rendezvous.stop_waiting()
        self._thread.join()

    def vanish(self) -> None:
        """Stop as if the process were gone: no word to anybody."""
        self._ended.set()
        self._thread.join()
        watch, announcer = self.rendezvous._watch, self.rendezvous._announcer
        assert watch is not None
        assert announcer is not None
        watch._stop.set()
        announcer._stop.set()
        for tether in (self.rendezvous._keepalive, self.rendezvous._keepalive_server):
            if tether is not None:
                tether.close()
        for served in (self.rendezvous._server, self.rendezvous._server_before):
            if served is not None:
                served.close()
        self.rendezvous._server = self.rendezvous._server_before = None
        self.rendezvous.joiner.endpoints.stop_serving()


class Town:
    """Launchers that meet at one port, and are gone after the test."""

    def __init__(self) -> None:
        self.port = free_port()
        self.secret: RunSecret | None = None
        self.launchers: list[Launcher] = []

    def start(
        self,
        name: str,
        least: int = 1,
        most: int = 3,
        take: Callable[[RunInfo], None] | None = None,
        **more: Any,
    ) -> Launcher:
        more.setdefault("secret", self.secret)
        settings = RendezvousSettings(
            [Endpoint("127.0.0.1", self.port)],
            least,
            most,
            **{
                "node_timeout": TIMEOUT,
                "rejoin_timeout": 60.0,
                "asked": {"steps": "1"},
                **more,
            },
        )
        launcher = Launcher(name, settings, take)
        self.launchers.append(launcher)
        return launcher

    def close(self) -> None:
        for launcher in self.launchers:
            launcher.end()
        for launcher in sorted(self.launchers, key=lambda one: -one.rendezvous.node):
            launcher.rendezvous.shutdown()


@pytest.fixture
def town() -> Iterator[Town]:
    with contextlib.closing(Town()) as town:
        yield town


def met(launcher: Launcher, *hosts: str) -> None:
    """Wait until ``launcher`` is in a world of just these hosts."""
    wait_for(lambda: launcher.worlds[-1:] == [list(hosts)], f"{hosts}, not {launcher.worlds}")


def test_launchers_meet_work_on_one_run_and_let_others_in(town: Town) -> None:
    first = town.start("a")
    met(first, "a")
    second = town.start("b")
    met(first, "a", "b")
    met(second, "a", "b")
    assert second.rendezvous.run == first.rendezvous.run == RunInfo("/runs/a", "a")
    assert second.taken == [RunInfo("/runs/a", "a")]
    assert (first.rendezvous.round, second.rendezvous.round) == (1, 1), (
        "b knows that the run goes on"
    )
    second.rendezvous.post(Note(message="from b"))
    wait_for(lambda: [e for e in first.written if isinstance(e, Note)], "b's news")
    assert [event.host for event in first.written if isinstance(event, NodeJoined)] == ["b"]
    assert second.written == []


def test_a_launcher_that_is_slow_to_come_in_is_waited_for(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The world of the others has ended for it, and would else do so again and again."""
    monkeypatch.setattr(joining, "LAST_CALL_SECONDS", 0.1)
    generation_to_join = joining.Joiner._generation_to_join

    def slow(joiner: joining.Joiner, *arguments: Any) -> int:
        found = generation_to_join(joiner, *arguments)
        if joiner.host == "b":
            time.sleep(1.5)
        return found

    monkeypatch.setattr(joining.Joiner, "_generation_to_join", slow)
    first = town.start("a")
    met(first, "a")
    second = town.start("b")
    met(second, "a", "b")
    met(first, "a", "b")


def test_a_launcher_that_vanishes_is_lost_and_the_rest_goes_on(town: Town) -> None:
    launchers = [town.start(name, least=2) for name in "abc"]
    wait_for(
        lambda: all(len(one.worlds[-1:]) and len(one.worlds[-1]) == 3 for one in launchers),
        "all",
    )
    order = launchers[0].worlds[-1]
    by_name = {one.name: one for one in launchers}
    main, second, third = (by_name[name] for name in order)
    main.vanish()  # it served the round, and maybe the meeting
    met(second, order[1], order[2])
    met(third, order[1], order[2])
    lost = [event for event in second.written if isinstance(event, NodeLeft)]
    assert [(event.host, event.reason) for event in lost] == [(order[0], "lost")]
    assert second.rendezvous.run == RunInfo(f"/runs/{order[0]}", order[0]), "still the same run"


def test_a_launcher_that_dies_is_known_before_the_timeout(town: Town) -> None:
    first = town.start("a", node_timeout=10 * PATIENCE)
    met(first, "a")
    second = town.start("b", node_timeout=10 * PATIENCE)
    met(first, "a", "b")
    met(second, "a", "b")
    second.vanish()
    met(first, "a")
    assert [event.reason for event in first.written if isinstance(event, NodeLeft)] == ["lost"]


def test_leaving_and_closing_are_told_apart(town: Town) -> None:
    first = town.start("a")
    met(first, "a")
    second = town.start("b")
    third = town.start("c")
    wait_for(lambda: first.worlds[-1:] and len(first.worlds[-1]) == 3, "all three")
    second._ended.set()
    second._thread.join()
    second.rendezvous.leave("preempted")
    wait_for(lambda: first.worlds[-1] == ["a", "c"], "the world without b")
    left = [event.reason for event in first.written if isinstance(event, NodeLeft)]
    assert left == ["preempted"]
    first.rendezvous.close_for_all("stopped by Ctrl-C on a")
    wait_for(lambda: isinstance(third.error, RendezvousClosedError), "c to hear of it")
    assert "stopped by Ctrl-C on a" in str(third.error)
    assert third.rendezvous.is_closed()


def test_a_launcher_with_another_config_is_refused_and_disturbs_nobody(town: Town) -> None:
    first = town.start("a")
    met(first, "a")
    other = town.start("b", asked={"steps": "2"})
    wait_for(lambda: other.error, "the refusal")
    assert isinstance(other.error, NotTheSameRun)
    assert "steps is 2 on b, 1 on a" in str(other.error)
    assert first.worlds == [["a"]]


def test_a_world_outlives_its_meeting_place_and_is_found_at_the_next(town: Town) -> None:
    server = serve_rendezvous("127.0.0.1", town.port)
    first = town.start("a")
    met(first, "a")
    assert not first.rendezvous.joiner.endpoints.serves
    server.close()
    time.sleep(2)
    assert first.rendezvous.lost() is None
    server = serve_rendezvous("127.0.0.1", town.port)
    second = town.start("b")
    met(first, "a", "b")
    assert second.rendezvous.run == RunInfo("/runs/a", "a"), "no second run beside the first"
    del server


def test_too_few_machines_and_a_stop_end_the_waiting(town: Town) -> None:
    alone = town.start("a", least=2, rejoin_timeout=1.0)
    wait_for(lambda: alone.error, "the end of its patience")
    assert isinstance(alone.error, RendezvousTimeoutError)
    assert str(alone.error) == (
        f"1 of 2 machines came to 127.0.0.1:{town.port} within 1 s (launch.rejoin_timeout); start "
        "the same command on the other."
    )
    waits = town.start("b", least=2)
    time.sleep(1)
    waits.rendezvous.stop_waiting()
    wait_for(lambda: waits.error, "the stop")
    assert isinstance(waits.error, WaitingStopped)


def test_a_machine_that_cannot_take_part_says_so_to_all(town: Town) -> None:
    def refuse(run: RunInfo) -> None:
        raise ConfigError("checkpoints cannot be seen here")

    first, second = (town.start(name, least=2, take=refuse) for name in "ab")
    wait_for(lambda: first.error and second.error, "both to end")
    kinds = sorted(type(one.error).__name__ for one in (first, second))
    assert kinds == ["ConfigError", "RendezvousClosedError"]
    assert all("checkpoints cannot be seen here" in str(one.error) for one in (first, second))


# With a secret.


def secret(text: str) -> RunSecret:
    return RunSecret((text * 20).encode(), f"the secret {text}")


def test_with_a_secret_launchers_meet_lose_each_other_and_meet_again(town: Town) -> None:
    town.secret = secret("abcdefgh")
    first = town.start("a")
    met(first, "a")
    second, third = town.start("b"), town.start("c")
    wait_for(lambda: len(first.worlds[-1]) == 3, "all three")
    second.vanish()
    met(first, "a", "c")
    met(third, "a", "c")
    first.rendezvous.close_for_all("done")
    wait_for(lambda: third.error, "the end")
    assert isinstance(third.error, RendezvousClosedError)


def test_who_has_another_secret_or_none_does_not_get_in_and_disturbs_nobody(town: Town) -> None:
    town.secret = secret("abcdefgh")
    first = town.start("a")
    met(first, "a")
    others = [
        town.start("b", secret=secret("ijklmnop"), rejoin_timeout=6.0),
        town.start("c", secret=None, rejoin_timeout=6.0),
    ]
    for other in others:
        wait_for(lambda other=other: other.error, "the end of waiting")
        assert isinstance(other.error, RendezvousTimeoutError)
        assert other.worlds == []
    assert "has another secret than the secret ijklmnop" in str(others[0].error)
    assert first.worlds == [["a"]]
    assert first.rendezvous.lost() is None


def test_who_has_a_secret_does_not_join_a_place_without_one(town: Town) -> None:
    first = town.start("a")
    met(first, "a")
    other = town.start("b", secret=secret("abcdefgh"), rejoin_timeout=2.0)
    wait_for(lambda: other.error, "the end of waiting")
    assert "was it started without?" in str(other.error)
    assert first.worlds == [["a"]]
