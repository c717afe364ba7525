"""What is found in logs, and in which."""

from __future__ import annotations

from pathlib import Path

import paceline
from paceline.diagnose.story.rank_logs import LogFolder, evidence_in, read_log

CHAINED = f"""starting
Traceback (most recent call last):
  File "/home/me/old.py", line 1, in f
    1 / 0
ZeroDivisionError: division by zero

lots of work
Traceback (most recent call last):
  File "/home/me/data.py", line 7, in read
    open(path)
FileNotFoundError: no such file

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/home/me/train.py", line 3, in main
    read()
  File "{Path(paceline.__file__).parent}/trainer/loop.py", line 9, in run
    raise DataError("cannot read")
paceline.errors.DataError: cannot read
cleaning up
"""

CRASH = """step 4
Fatal Python error: Segmentation fault

Thread 0x1 (most recent call first):
  File "/home/me/loader.py", line 2 in wait

Current thread 0x2 (most recent call first):
  File "/home/me/train.py", line 5 in kernel

Extension modules: numpy, torch (total: 2)
"""

GAVE_UP = """terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at pair.cc:446] op.preamble.length <= op.nbytes. 16 vs 8
"""


def test_the_last_traceback_with_those_that_led_to_it() -> None:
    found = evidence_in(CHAINED)
    assert found.traceback.startswith('Traceback (most recent call last):\n  File "/home/me/data')
    assert found.traceback.endswith("paceline.errors.DataError: cannot read")
    assert "ZeroDivisionError" not in found.traceback
    assert found.error == "paceline.errors.DataError: cannot read"
    assert found.place == "/home/me/train.py:3", "the user's own line, not the library's"
    assert found.shown == found.traceback


def test_torchs_rank_before_each_line_is_taken_away() -> None:
    found = evidence_in("".join(f"[rank1]: {line}\n" for line in CHAINED.splitlines()))
    assert found == evidence_in(CHAINED)


def test_the_stacks_of_a_crash() -> None:
    found = evidence_in(CRASH)
    assert found.dump.splitlines()[0] == "Fatal Python error: Segmentation fault"
    assert found.dump.endswith('File "/home/me/train.py", line 5 in kernel')
    assert found.shown == found.dump


def test_the_last_words_of_native_code() -> None:
    found = evidence_in(GAVE_UP)
    assert found.last_words[-1].startswith("what():  [enforce fail at pair.cc:446]")


def test_a_log_without_a_reason_is_shown_by_its_end() -> None:
    found = evidence_in("".join(f"line {i}\n" for i in range(100)))
    assert found.shown.splitlines() == [f"line {i}" for i in range(80, 100)]
    assert evidence_in("").shown == ""


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_bytes(b"\xff noise \n" * 100_000 + CRASH.encode())
    assert read_log(log).dump
    assert read_log(tmp_path / "none.log").tail == "(cannot be read: No such file or directory)"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_log_of_a_rank_at_each_start_and_on_each_node(tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs"
    write(logs / "rank0.log", "first 0")
    write(logs / "rank1.log", "first 1")
    write(logs / "attempt2" / "rank1.log", "third 1")
    write(logs / "node1-beta" / "attempt2" / "rank12.log", "third 12")
    found = LogFolder(logs)

    def tail(attempt: int, rank: int, log: str = "") -> str | None:
        evidence = found.of(attempt, rank, log)
        return None if evidence is None else evidence.tail

    assert tail(0, 1) == "first 1"
    assert tail(2, 1) == "third 1"
    assert tail(2, 12) == "third 12"
    assert tail(1, 1) is None
    assert [e.tail for e in found.of_all(2)] == ["third 1", "third 12"]
    # The launcher said where it was; the run folder has been moved since.
    assert tail(0, 1, "/old/place/run/logs/attempt2/rank1.log") == "third 1"
    elsewhere = write(tmp_path / "elsewhere" / "rank1.log", "over here")
    # A record that was received may name any file of this machine: logs of the run alone count.
    assert tail(0, 1, str(elsewhere)) == "first 1"
    (logs / "rank7.log").symlink_to(elsewhere)
    assert LogFolder(logs).of(0, 7) is None


def test_a_run_without_logs_has_no_evidence(tmp_path: Path) -> None:
    assert LogFolder(tmp_path / "logs").of(0, 0) is None
    assert LogFolder(tmp_path / "logs").of_all(0) == []
