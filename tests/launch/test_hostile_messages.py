"""Messages that a stranger left in a store: no file is named by them, no process signalled, and no
thread that others rely on ends because of them."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from node_cases import wait_for
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from paceline.checkpoint.memory.background_thread import BackgroundThread
from paceline.cli.train_nodes import SharedRunFolder
from paceline.diagnose.hangs import unresponsive
from paceline.diagnose.hangs.oversee import HangOverseer
from paceline.diagnose.hangs.rank_heartbeat import Heartbeat, RankReport
from paceline.diagnose.hangs.rank_heartbeat_store import HeartbeatStore
from paceline.events import Event, Note
from paceline.launch import background_errors
from paceline.launch.background_errors import BackgroundErrors
from paceline.launch.hang_watcher import StartedRanks
from paceline.launch.listening import listen
from paceline.launch.logs import LogName, node_folder
from paceline.launch.messages import MOST_BYTES, BadMessage, decode, decode_number, encode
from paceline.launch.outcome_store import OutcomeStore
from paceline.launch.rendezvous import node_heartbeats
from paceline.launch.rendezvous.forwarding import EventForwarder, ForwardedEvent, LogPiece, LogTail
from paceline.launch.rendezvous.keepalive import KeepAliveConnection, KeepAliveServer
from paceline.launch.rendezvous.membership import NodeMember, RunInfo
from paceline.launch.rendezvous.node_heartbeats import HeartbeatMonitor
from paceline.launch.rendezvous.stores import StoreConnection, serve
from paceline.launch.run_choice import RunChoice
from paceline.launch.run_folder import RunFolder

ODD = [
    b"",
    b"not json",
    b"\xff\xfe\x00",
    b"[]",
    b"null",
    b"{}",
    b'{"event": 5, "id": []}',
    b'{"event": "{}", "id": "x"}',
    b'{"event": "[1]", "id": "x"}',
    b'{"event": "{\\"kind\\": \\"Note\\", \\"message\\": 7}", "id": "x"}',
    b'{"event": "{\\"kind\\": \\"RanksStarted\\"}", "id": "x"}',
    b'{"log": "../../../x", "data": "aGk="}',
    b"[" * 100_000,
    b'{"log": {"node": 1, "rank": 1}, "sender": 1, "data": "not base64"}',
    b"9" * 5000,
    b'"' + b"x" * (MOST_BYTES + 1) + b'"',
]
"""What might stand in a store instead of a message."""


class LocalConnection:
    """A connection to a store in this process."""

    def __init__(self) -> None:
        self.store = HashStore()

    def call(self, operation: Any) -> Any:
        return operation(self.store)


def leave(connection: Any, text: bytes | str) -> None:
    """Leave something in the store for node 0 to take, as a stranger would."""
    number = connection.call(lambda store: store.add("forwarded/count", 1))
    connection.call(lambda store: store.set(f"forwarded/{number}", text))


# Files.


@pytest.mark.parametrize(
    "name",
    ["../../secrets", "/etc/passwd", "node1-b/../../x", {"node": "../x", "rank": 0}, 7, None],
)
def test_no_message_names_a_file(tmp_path: Path, name: Any) -> None:
    run = tmp_path / "run"
    run.mkdir()
    stack: Any = None
    nodes = SharedRunFolder(RunChoice(), config_text="", checkpoint_where=None, stack=stack)
    nodes.run = RunFolder(run)
    said: list[str] = []
    main = EventForwarder(lambda _: None, nodes.keep_log, said.append)
    main.new_round(["a", "b"], 0)
    connection: Any = LocalConnection()
    leave(
        connection, json.dumps({"log": name, "sender": 1, "data": base64.b64encode(b"x").decode()})
    )
    leave(connection, encode(LogPiece(LogName(1, 3), 1, base64.b64encode(b"good").decode())))
    main.exchange(connection, is_main=True)
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert files == ["run/logs/node1-b/rank3.log"], "and the next one is taken all the same"
    assert len(said) == 1
    assert "left out" in said[0]


@pytest.mark.parametrize("host", ["../../x", "/etc", "..", ".", "", "a/b", "x\0y", "ü" * 300])
def test_a_host_of_any_name_has_a_folder_of_its_own(tmp_path: Path, host: str) -> None:
    folder = node_folder(2, host)
    assert folder.startswith("node2-")
    assert (tmp_path / folder).resolve().parent == tmp_path
    path = LogName(2, 0, attempt=1).path(tmp_path, host)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"hello")
    found = LogTail(tmp_path, host).peek()
    assert found is not None
    assert (found.name, found.data) == (LogName(2, 0, 1), b"hello")


def test_logs_of_node_0_and_of_no_node_are_not_for_others_to_write() -> None:
    kept: list[Any] = []
    main = EventForwarder(lambda _: None, lambda *args: kept.append(args), lambda _: None)
    main.new_round(["a", "b"], 0)
    connection: Any = LocalConnection()
    for sender in (0, -1, 2, 10**9):
        leave(connection, encode(LogPiece(LogName(0, 0), sender, "aGk=")))
    main.exchange(connection, is_main=True)
    assert kept == []
    with pytest.raises(ValueError, match="no such log"):
        LogName(-1, 0)


# Processes.


def beat(rank: int, pid: int, **more: Any) -> Heartbeat:
    facts = {"world": (0, 1), "number": 1, "host": socket.gethostname(), "after": 1.0}
    return Heartbeat(rank=rank, pid=pid, still=9.0, moves=0, **{**facts, **more})


def test_a_process_is_not_signalled_because_its_number_stands_in_a_store(tmp_path: Path) -> None:
    victim = subprocess.Popen(["sleep", "60"], start_new_session=True)  # SIGUSR2 would end it
    store = serve("127.0.0.1", 0)
    board = HeartbeatStore("127.0.0.1", store.port)
    overseer = HangOverseer(action="wait", say=None)
    try:
        board.post_beat(beat(0, victim.pid))
        board.ask()
        started = StartedRanks({0: os.getpid()}, 2, 0, ["a"], "127.0.0.1", store.port, 0, tmp_path)
        overseer.started(started)
        wait_for(lambda: board.answered(1, [0]), "the launcher to speak for its silent rank")
        assert victim.poll() is None
        for find in (unresponsive.started_here({0: os.getpid()}), unresponsive.sibling):
            unresponsive.answer_for_neighbours(board, 2, [0, 1], find)
        # Even of a process that it may ask, nobody is signalled who has not prepared for it.
        assert unresponsive.report_on(beat(0, victim.pid), victim.pid).stack == ()
        assert victim.poll() is None
    finally:
        overseer.ended()
        victim.send_signal(signal.SIGKILL)
        victim.wait()


def test_a_neighbour_is_known_by_its_parent(tmp_path: Path) -> None:
    child = "import sys; print(1, flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert unresponsive.sibling(beat(1, process.pid)) is None, "a child is no sibling"
        assert unresponsive.sibling(beat(1, 1)) is None
        assert unresponsive.sibling(beat(1, os.getpid())) == os.getpid()
        assert unresponsive.sibling(beat(1, os.getpid(), host="elsewhere")) is None
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


# Threads.


def watch_of(store: TCPStore, forwarder: EventForwarder, notices: list[str]) -> HeartbeatMonitor:
    node_heartbeats.prepare_store(store, 2)
    return HeartbeatMonitor(
        lambda: StoreConnection("127.0.0.1", store.port, 30.0),
        StoreConnection("127.0.0.1", store.port, 30.0),
        node=0,
        hosts=["a", "b"],
        timeout=60.0,
        forwarder=forwarder,
        notice=notices.append,
    )


def beats_of(store: TCPStore) -> int:
    return int(store.add("alive/0", 0))


def test_the_watch_over_nodes_survives_any_message_and_any_callback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_heartbeats, "beat_seconds", lambda _: 0.02)
    written: list[Event] = []

    def write(event: Event) -> None:
        if isinstance(event, Note) and event.message == "full disk":
            raise OSError(28, "No space left on device")
        written.append(event)

    notices: list[str] = []
    forwarder = EventForwarder(write, lambda *_: None, notices.append)
    forwarder.new_round(["a", "b"], 0)
    store = serve("127.0.0.1", 0)
    connection = StoreConnection("127.0.0.1", store.port, 30.0)
    watch = watch_of(store, forwarder, notices)
    try:
        for odd in ODD:
            if odd:
                leave(connection, odd)
        leave(connection, encode(ForwardedEvent(Note(message="full disk").to_json(), "1")))
        leave(connection, encode(ForwardedEvent(Note(message="after all that").to_json(), "2")))
        wait_for(lambda: any(getattr(e, "message", "") == "after all that" for e in written), "it")
        for key in ("over", "waiting", "left/1", "alive/1"):
            kept = store.get(key)
            for odd in (b"\xff\xff", b"[", b'{"closed": 5}', b"-", b"1e999"):
                store.set(key, odd)
                time.sleep(0.05)
            store.set(key, kept)
        seen = beats_of(store)
        wait_for(lambda: beats_of(store) > seen + 2, "further signs of life")
        assert watch._thread.is_alive()
        assert watch.closed is None
        assert all(isinstance(event.message, str) for event in written if isinstance(event, Note))
        assert any("No space left" in text for text in notices)
        assert len(notices) < 20, "rate-limited"
    finally:
        watch.stop("ended")
        connection.close()


def test_trouble_is_reported_once_a_minute_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(background_errors.time, "monotonic", lambda: now[0])
    said: list[str] = []
    enduring = BackgroundErrors("the watch", said.append)
    for second in range(130):
        now[0] = second
        with enduring.reported("reading"):
            raise ValueError("odd\x1b[31m\nmore")
    assert [text.count("more like it") for text in said] == [0, 1, 1]
    assert said[1].startswith("reading: ValueError: odd\N{REPLACEMENT CHARACTER}[31m (and 59 more")
    with pytest.raises(KeyError), enduring.reported(but=(KeyError,)):
        raise KeyError("the caller's")
    with pytest.raises(KeyboardInterrupt), enduring.reported():
        raise KeyboardInterrupt


def test_connections_that_say_nothing_or_nonsense_do_not_disturb_the_tethers() -> None:
    keepalive_server = KeepAliveServer(listen("127.0.0.1", 0), 3, lambda _: None)
    strangers = [socket.create_connection(("127.0.0.1", keepalive_server.port)) for _ in range(200)]
    try:
        for number, stranger in enumerate(strangers[:100]):
            stranger.sendall([b"\0\0\0\x7f", b"x", b"\xff" * 1000, b"\0\0\0\0"][number % 4])
        node = KeepAliveConnection("127.0.0.1", keepalive_server.port, 2, 30.0)
        time.sleep(0.2)
        for stranger in strangers:
            stranger.close()
        time.sleep(0.2)
        assert keepalive_server.disconnected == set()
        node.close()
        wait_for(lambda: keepalive_server.disconnected == {2}, "the end of the one that is a node")
    finally:
        keepalive_server.close()


def test_an_outcome_that_is_none_is_no_outcome() -> None:
    store = serve("127.0.0.1", 0)
    outcomes = OutcomeStore(store, 0, 2)
    store.set("outcome", '{"ending": 5}')
    outcomes.watch([0, 1])
    store.set("done/1", "")
    try:
        wait_for(lambda: 1 in outcomes._done, "what comes after it")
        assert outcomes.outcome() is None
    finally:
        outcomes.close()


def test_odd_signs_of_life_are_left_out_and_the_rest_is_read() -> None:
    store = serve("127.0.0.1", 0)
    board = HeartbeatStore("127.0.0.1", store.port)
    board.post_beat(beat(1, 1))
    for odd in ODD:
        store.set("paceline/watch/beat/0", odd)
        store.set("paceline/watch/report/1/0", odd)
        store.set("paceline/watch/leader", odd)
        assert set(board.beats([0, 1])) == {1}
        assert board.reports(1, [0, 1]) == {}
        assert board.leader() == (0, 0)
    store.set("paceline/watch/beat/0", beat(5, 1).to_json())
    assert set(board.beats([0, 1])) == {1}, "a rank speaks for itself"


# Reading.


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize(
    "kind", [NodeMember, RunInfo, Heartbeat, RankReport, ForwardedEvent, LogPiece]
)
def test_what_is_no_message_is_a_bad_message_and_nothing_else(kind: Any, odd: bytes) -> None:
    if (kind is ForwardedEvent and b'"id": "x"' in odd) or (
        kind is LogPiece and b"not base64" in odd
    ):
        return  # found out when it is delivered
    with pytest.raises(BadMessage):
        decode(kind, odd)


def test_messages_come_out_as_they_went_in() -> None:
    run = RunInfo("/runs/x", "abc", ("/a", "/b"), True)
    for message in (
        NodeMember(
            "i", "h", "10.0.0.1", 2, 3, {"steps": "1"}, 1, 0, run, {"i": "h"}, "10.0.0.2", True
        ),
        beat(3, 7, step=None, longest_step=1),
        run,
    ):
        assert decode(type(message), encode(message)) == message
    assert decode_number(b"-12") == -12
    for odd in (b"1.5", b"\xff", b"9" * 100, b"0x1", b""):
        with pytest.raises(BadMessage):
            decode_number(odd)


def test_a_snapshot_that_fails_does_not_end_the_thread_that_keeps_them(capfd) -> None:
    background = BackgroundThread()
    done: list[int] = []
    for job in (lambda: 1 // 0, lambda: done.append(1)):
        background.begin(job)
        background.wait()
    background.end()
    assert done == [1]
    assert "a snapshot was not kept: ZeroDivisionError" in capfd.readouterr().err
