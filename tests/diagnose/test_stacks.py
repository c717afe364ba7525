"""Stacks: taken from a living thread, from outside a process that cannot speak, and read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.diagnose.hangs.rank_heartbeat import GONE, SILENT, STOPPED, Frame, Heartbeat
from paceline.diagnose.hangs.stacks import main_stack, parse_dump, spot, without_launcher
from paceline.diagnose.hangs.unresponsive import report_on

TORCH = "/venv/lib/python3.11/site-packages/torch"
OWN = Frame("/home/me/train.py", 5, "main", "step()")

DUMP = """Thread 0x0000ffff00000001 (most recent call first):
  File "/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x0000ffff00000002 (most recent call first):
  File "/home/me/a b.py", line 9 in inner
  File "/home/me/train.py", line 5 in <module>
  File "/x/paceline/launch/worker.py", line 77 in main
"""


def test_a_dump_is_read_for_the_thread_asked_for() -> None:
    assert parse_dump(DUMP, 0xFFFF00000002) == (
        Frame("/home/me/train.py", 5, "<module>"),
        Frame("/home/me/a b.py", 9, "inner"),
    )
    assert parse_dump(DUMP, 3) == ()


def test_the_last_dump_counts() -> None:
    later = DUMP.replace("line 9 in inner", "line 12 in inner")
    assert parse_dump(DUMP + "\n" + later, 0xFFFF00000002)[-1].line == 12


def test_what_started_the_program_is_left_out() -> None:
    worker = Frame("/x/paceline/launch/worker.py", 77, "main")
    assert without_launcher([worker, Frame("<frozen runpy>", 88, "_run_code"), OWN]) == [OWN]


@pytest.mark.parametrize(
    ("called", "doing"),
    [
        ([Frame(f"{TORCH}/distributed/distributed_c10d.py", 1, "all_reduce")], "collective"),
        ([Frame(f"{TORCH}/distributed/distributed_c10d.py", 1, "recv")], "message"),
        ([Frame(f"{TORCH}/autograd/graph.py", 1, "_engine_run_backward")], "collective"),
        ([Frame(f"{TORCH}/utils/data/dataloader.py", 1, "__next__")], "data"),
        ([Frame("/usr/lib/python3.11/socket.py", 1, "readinto")], "reading"),
        ([Frame(f"{TORCH}/serialization.py", 1, "save")], "saving"),
        ([], "code"),
    ],
)
def test_what_a_stack_shows(called: list[Frame], doing: str) -> None:
    seen = spot([OWN, *called])
    assert seen.doing == doing
    assert seen.where == "train.py:5 in main"


def test_a_hook_that_a_backward_calls_is_the_users_code() -> None:
    backward = Frame(f"{TORCH}/autograd/graph.py", 1, "_engine_run_backward")
    hook = Frame("/home/me/train.py", 30, "hook", "time.sleep(1)")
    assert spot([OWN, backward, hook]).doing == "code"
    assert spot([OWN, backward, hook]).where == "train.py:30 in hook"


def test_a_wait_in_the_users_own_line() -> None:
    assert spot([Frame("/home/me/train.py", 5, "main", "work.wait()")]).doing == "collective"


def test_stack_of_the_main_thread_from_another() -> None:
    found: list[tuple[Frame, ...]] = []
    thread = threading.Thread(target=lambda: found.append(main_stack()[0]))
    thread.start()
    thread.join()
    assert any(f.function == "test_stack_of_the_main_thread_from_another" for f in found[0])


PROGRAM = """
import ctypes, sys, threading
from paceline.diagnose.hangs.stacks import prepare_stack_file
prepare_stack_file(); print(threading.main_thread().ident, flush=True)
def held():
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
held()
"""


@pytest.mark.cold
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_process_that_cannot_speak_is_seen_from_outside(tmp_path: Path) -> None:
    script = tmp_path / "held.py"
    script.write_text(PROGRAM)
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        thread = process.stdout.readline()
        beat = Heartbeat(
            rank=1,
            world=(0, 1),
            number=7,
            host="here",
            pid=process.pid,
            after=1.0,
            still=0.0,
            moves=0,
            main_thread=int(thread),
        )
        deadline = time.monotonic() + 240
        while (report := report_on(beat, process.pid)).stack[-1:] == () or report.stack[
            -1
        ].function != "held":
            assert time.monotonic() < deadline, report
            time.sleep(0.1)
        assert report.state == SILENT
        assert [frame.function for frame in report.stack] == ["<module>", "held"]
        assert process.poll() is None  # it was asked, not harmed

        os.kill(process.pid, signal.SIGSTOP)
        while report_on(beat, process.pid).state != STOPPED:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
    assert report_on(beat, process.pid).state == GONE
