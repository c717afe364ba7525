"""Following a run from outside while it is being written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from paceline.events import Event, EventLog, Note, read
from paceline.track import Progress, Recorder, follow, following
from paceline.track import tracker as tracker_module


class Listener:
    def __init__(self) -> None:
        self.messages: list[str] = []
        self.closed = False

    def handle(self, event: Event) -> None:
        assert isinstance(event, Note)
        self.messages.append(event.message)

    def close(self) -> None:
        self.closed = True


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_follow_waits_for_the_file_and_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    stop = threading.Event()
    seen: list[str] = []

    def listen() -> None:
        seen.extend(e.message for e in follow(path, stop) if isinstance(e, Note))

    thread = threading.Thread(target=listen)
    thread.start()
    line = Note(message="ünïcode").to_json().encode() + b"\n"
    with open(path, "wb", buffering=0) as file:
        for cut in (3, 20, len(line)):
            file.write(line[:cut])
            line = line[cut:]
            time.sleep(0.15)
        file.write(b'{"kind": "FromTheFuture"}\nnot json\n')
        file.write(Note(message="last").to_json().encode() + b'\n{"kind": "Note", "mess')
    stop.set()
    thread.join()
    assert seen == ["ünïcode", "last"]


def test_follow_takes_a_folder_and_may_skip_the_past(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.write(Note(message="past"))
    stop = threading.Event()
    stop.set()
    assert [e.message for e in follow(tmp_path, stop) if isinstance(e, Note)] == ["past"]
    assert list(follow(tmp_path, stop, from_end=True)) == []
    log.close()


def test_following_hands_on_what_is_written_meanwhile(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.write(Note(message="of an earlier run"))
    first, second = Listener(), Listener()
    with following(tmp_path, [first, second]):
        log.write(Note(message="one"))
        eventually(lambda: first.messages == ["one"])
        log.write(Note(message="two"))
    log.close()
    assert first.messages == second.messages == ["one", "two"]
    assert first.closed
    assert second.closed


def test_following_shows_while_it_is_asked_to(tmp_path: Path) -> None:
    """Of several machines that follow one run, one shows it, and another may take over."""
    seen, never = Listener(), Listener()
    is_ours, looks = threading.Event(), []

    def shown() -> bool:
        looks.append(True)
        return is_ours.is_set()

    log = EventLog(tmp_path)
    with (
        following(tmp_path, [seen], shown=shown),
        following(tmp_path, [never], shown=lambda: False),
    ):
        log.write(Note(message="not for us"))
        looks.clear()
        eventually(lambda: len(looks) > 2)  # so it has been read
        is_ours.set()
        log.write(Note(message="for us"))
        eventually(lambda: seen.messages == ["for us"])
    log.close()
    assert seen.closed
    assert never.messages == []
    assert not never.closed, "it was never begun"


def test_a_failing_tracker_is_dropped_with_one_warning(tmp_path: Path) -> None:
    class Broken(Listener):
        def handle(self, event: Event) -> None:
            super().handle(event)
            raise RuntimeError("no space left")

        def close(self) -> None:
            raise AssertionError("a dropped tracker is not called again")

    class Unclosable(Listener):
        def close(self) -> None:
            raise OSError("still busy")

    log, healthy, broken = EventLog(tmp_path), Listener(), Broken()
    with following(tmp_path, [broken, Unclosable(), healthy]):
        for i in range(5):
            log.write(Note(message=str(i)))
    log.close()
    assert broken.messages == ["0"]
    assert [m for m in healthy.messages if len(m) == 1] == list("01234")
    warnings = [e.message for e in read(tmp_path) if isinstance(e, Note) and e.level == "warning"]
    assert warnings == [
        "tracker Broken failed (RuntimeError: no space left). The run goes on without it.",
        "tracker Unclosable could not be closed (OSError: still busy).",
    ]
    assert healthy.messages[-1] == warnings[-1], "who is still there hears of it"


class Slow(Recorder):
    name: ClassVar[str] = "Slow"

    def __init__(self, *, fail_at: int | None = None) -> None:
        super().__init__()
        self.release = threading.Event()
        self.batches: list[int] = []
        self.finished = 0
        self._fail_at = fail_at

    def record(self, events: Sequence[Event]) -> None:
        self.release.wait(200)
        self.batches.append(len(events))
        if self._fail_at is not None and sum(self.batches) >= self._fail_at:
            raise ConnectionError("server gone")

    def finish(self) -> None:
        self.finished += 1


def test_a_slow_recorder_does_not_hold_up_the_run() -> None:
    recorder = Slow()
    for i in range(1200):
        recorder.handle(Note(message=str(i)))
    assert sum(recorder.batches) == 0, "all were taken in, none is written yet"
    recorder.release.set()
    recorder.close()
    assert sum(recorder.batches) == 1200
    assert len(recorder.batches) < 10, "written in batches"
    assert recorder.finished == 1
    recorder.handle(Note(message="another fit with the same tracker"))
    recorder.close()
    assert (sum(recorder.batches), recorder.finished) == (1201, 2)


def test_a_broken_recorder_becomes_one_warning(tmp_path: Path) -> None:
    recorder = Slow(fail_at=1)
    recorder.release.set()
    listener = Listener()
    log = EventLog(tmp_path)
    with following(tmp_path, [recorder, listener]):
        log.write(Note(message="a"))
        eventually(lambda: len(listener.messages) == 2)
        log.write(Note(message="b"))
    log.close()
    message = "Slow stopped recording (ConnectionError: server gone). The run goes on without it."
    assert listener.messages == ["a", message, "b"]
    assert recorder.finished == 0


def test_on_its_own_a_broken_recorder_logs_its_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Slow(fail_at=1)
    recorder.release.set()
    recorder.handle(Note(message="a"))
    recorder.close()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "Slow stopped recording" in caplog.text


def test_an_unreachable_server_is_not_waited_for_forever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracker_module, "_CLOSE_SECONDS", 0.1)
    recorder = Slow()
    recorder.handle(Note(message="a"))
    recorder.close()
    assert "Slow had not written everything" in caplog.text
    recorder.release.set()


def test_progress_hears_of_troubles_at_the_very_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Unclosable(Listener):
        def close(self) -> None:
            raise OSError("disk full")

    log = EventLog(tmp_path)
    with following(tmp_path, [Progress(), Unclosable()]):
        log.write(Note(message="hello"))
    log.close()
    assert capsys.readouterr().out == (
        "hello\nwarning: tracker Unclosable could not be closed (OSError: disk full).\n"
    )
