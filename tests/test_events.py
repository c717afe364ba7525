"""Events survive their file: round trip, killed writers, several writers, newer versions."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path

import pytest

from paceline import events
from paceline.events import EvalDone, Event, EventLog, Note, StepDone


def step(number: int, loss: float = 1.5) -> StepDone:
    return StepDone(step=number, epoch=0, loss=loss, lr=0.1, samples=4, seconds=0.2)


def test_round_trip_with_numbers_that_json_lacks(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    written = [
        step(1, math.inf),
        EvalDone(step=1, epoch=0, metrics={"loss": -math.inf, "a": 0.5}, samples=3, seconds=1.0),
        Note(message='ä\n"quoted"'),
    ]
    for event in written:
        log.write(event)
    log.close()
    assert list(events.read(tmp_path)) == written
    assert math.isnan(Event.from_json(step(1, math.nan).to_json()).loss)


def test_half_a_line_of_a_killed_writer_costs_only_itself(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.write(step(1))
    log.close()
    with open(log.path, "ab") as file:
        file.write(step(2).to_json().encode()[:20])
    log = EventLog(tmp_path)
    log.write(step(3))
    log.close()
    assert [event.step for event in events.read(tmp_path)] == [1, 3]


def test_records_of_a_newer_version_do_not_hurt(tmp_path: Path) -> None:
    (tmp_path / events.FILE_NAME).write_text(
        json.dumps({"kind": "Invented", "time": 1.0, "x": 1}) + "\n"
        + json.dumps({"kind": "Note", "time": 1.0, "message": "m", "colour": "red"}) + "\n"
        + "[1, 2]\n"
    )  # fmt: skip
    assert list(events.read(tmp_path)) == [Note(time=1.0, message="m")]


def test_several_writers_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    def write(start: int) -> None:
        log = EventLog(tmp_path)
        for number in range(start, start + 200):
            log.write(step(number))
        log.close()

    threads = [threading.Thread(target=write, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({event.step for event in events.read(tmp_path)}) == 800


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind": "StepDone"}',
        b'{"kind": ["StepDone"]}',
        b'{"kind": {}}',
        b"[]",
        b"5",
        b"",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"kind": "Note", "message": 5}',
        b'{"kind": "Note", "message": "a", "time": "now"}',
        b'{"kind": "Note", "message": "a", "time": 1e300}',
        b'{"kind": "Note", "message": "a", "time": -5}',
        b'{"kind": "Note", "message": "a", "message": "b"}',
        b'{"kind": "WireUsed", "step": 1, "steps": 0, "bytes_sent": [1], "bytes_plain": [1]}',
        b'{"kind": "WireUsed", "step": 1, "steps": 1, "bytes_sent": [], "bytes_plain": [1]}',
        b'{"kind": "HangOver", "step": 1, "seconds": "nan"}',
        b'{"kind": "HangOver", "step": 1.5, "seconds": 1}',
        b'{"kind": "HangOver", "step": 1' + b"0" * 400 + b', "seconds": 1}',
    ],
)
def test_a_line_that_is_no_event_is_passed_over(line: bytes, tmp_path: Path) -> None:
    assert Event.from_json(line) is None
    good = Note(message="nan").to_json().encode()
    (tmp_path / "events.jsonl").write_bytes(b"\n".join([good, line, good]) + b"\n")
    assert [e.message for e in events.read(tmp_path)] == ["nan", "nan"]


def test_a_log_that_is_no_file_or_larger_than_any_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    os.mkfifo(log)
    with pytest.raises(OSError, match="a pipe"):
        list(events.read(tmp_path))
    log.unlink()
    with open(log, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="at most"):
        list(events.read(tmp_path))
