"""Processes that would outlive their launcher, ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from paceline.launch import process_reaper
from paceline.launch.process_reaper import ProcessReaper, end_groups, is_running, running_members

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print("up", flush=True)
time.sleep(600)
"""

KILLED_LAUNCHER = f"""
import os, signal, subprocess, sys
from paceline.launch import process_reaper
from paceline.launch.process_reaper import ProcessReaper
reaper = ProcessReaper()
rank = subprocess.Popen([sys.executable, "-S", "-c", {STUBBORN!r}], start_new_session=True,
                        stdout=subprocess.PIPE)
rank.stdout.readline()
reaper.watch([rank.pid])
reaper.watch([2**22 + 1])
reaper.forget([2**22 + 1])
print(rank.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def wait_until_gone(group: int) -> None:
    deadline = time.monotonic() + 120
    while running_members([group]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running_members([group]) == []


def stubborn_group() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", STUBBORN], start_new_session=True, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.stdout.close()
    return process


def test_end_groups_ends_children_and_those_who_ignore_sigterm() -> None:
    process = stubborn_group()
    assert len(running_members([process.pid])) == 2
    end_groups([process.pid], patience=0.2)
    wait_until_gone(process.pid)
    assert not is_running(process.pid), "dead, though nobody has collected it yet"
    assert process.wait() == -signal.SIGKILL
    end_groups([process.pid])  # nothing left: nothing to do


def test_reaper_ends_what_a_killed_launcher_leaves() -> None:
    launcher = subprocess.run(
        [sys.executable, "-c", KILLED_LAUNCHER], stdout=subprocess.PIPE, check=False, timeout=1200
    )
    assert launcher.returncode == -signal.SIGKILL
    wait_until_gone(int(launcher.stdout))


def test_reaper_leaves_forgotten_groups_alone() -> None:
    process = stubborn_group()
    reaper = ProcessReaper()
    reaper.watch([process.pid])
    reaper.forget([process.pid])
    reaper.close()
    assert len(running_members([process.pid])) == 2
    end_groups([process.pid], patience=0.0)
    process.wait()
    wait_until_gone(process.pid)


def test_reaper_hears_what_a_launcher_said_before_it_was_up() -> None:
    """A launcher may die before the interpreter of its reaper has started."""
    process = stubborn_group()
    told = subprocess.run(
        [sys.executable, "-I", "-S", process_reaper.__file__, "1"],  # not its parent: dead, to it
        input=f"+{process.pid}\n".encode(),
        check=False,
        timeout=1200,
    )
    assert told.returncode == 0
    assert process.wait(timeout=120) == -signal.SIGKILL
    wait_until_gone(process.pid)
