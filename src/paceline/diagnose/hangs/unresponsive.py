"""Reports on ranks that do not answer, made by another process on the same machine.

Looks at ``/proc`` and, where the rank has prepared for it, has ``faulthandler`` write its stack.
Needs no rights but those of the same user.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from paceline.diagnose.hangs.rank_heartbeat import (
    GONE,
    LEFT,
    SILENT,
    STOPPED,
    Frame,
    Heartbeat,
    RankReport,
)
from paceline.diagnose.hangs.rank_heartbeat_store import HeartbeatStore
from paceline.diagnose.hangs.stacks import STACK_FILE_NAME, STACK_SIGNAL, parse_dump

_SECONDS_FOR_A_STACK = 0.5
FindPid = Callable[[Heartbeat], int | None]
"""The process that a rank is, where that is known for sure; what the beat says may be a lie."""


def started_here(pids: Mapping[int, int]) -> FindPid:
    """For a launcher: its own ranks are the processes that it started."""
    return lambda beat: pids.get(beat.rank)


def sibling(beat: Heartbeat) -> int | None:
    """For a rank that nobody of ours launched: the process, if it has the same parent and user."""
    parent, user = _parent_and_user(os.getpid())
    if beat.host != socket.gethostname() or parent in (0, 1):
        return None
    return beat.pid if _parent_and_user(beat.pid) == (parent, user) else None


def answer_for_neighbours(
    store: HeartbeatStore, question: int, ranks: Iterable[int], find_pid: FindPid
) -> None:
    """Answer for those of ``ranks`` on this machine that have not answered.

    Only processes that ``find_pid`` knows are looked at and signalled, never one because its
    number stood in a store.
    """
    beats = store.beats(set(ranks) - store.answered(question, ranks))
    for rank, beat in beats.items():
        pid = find_pid(beat)
        if pid is not None:
            report = report_on(beat, pid)
            # It may have answered in the meantime: then its own report counts.
            if rank not in store.answered(question, [rank]):
                store.answer(question, report)


def report_on(beat: Heartbeat, pid: int, *, stack: bool = True) -> RankReport:
    """What can be seen from outside of the process ``pid`` that left ``beat``."""
    state = LEFT if beat.left else _process_state(pid)
    speechless = state == SILENT
    return beat.report(
        state=state,
        stack=_stack_of(pid, beat.main_thread) if speechless and stack else (),
        kernel=kernel_function(pid) if speechless else "",
        disk=speechless and main_thread_state(pid) == "D",
    )


def main_thread_state(pid: int) -> str:
    """The letter ``/proc`` has for what the main thread does; empty when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]  # the name before it may hold brackets and spaces


def kernel_function(pid: int) -> str:
    """Where in the kernel the main thread sleeps; empty if it does not, or nobody tells."""
    try:
        name = Path(f"/proc/{pid}/wchan").read_text(errors="replace").strip()
    except OSError:
        return ""
    return "" if name == "0" else name


def _process_state(pid: int) -> str:
    letter = main_thread_state(pid)
    if letter in ("", "Z", "X"):
        return GONE
    return STOPPED if letter in "Tt" else SILENT


def _stack_of(pid: int, thread: int) -> tuple[Frame, ...]:
    """Ask the process for its stacks by signal; empty when it has not prepared for that."""
    try:
        if (file := _stack_file(pid)) is None:
            return ()
        before = os.stat(file).st_size
        os.kill(pid, STACK_SIGNAL)
        text = _written_since(file, before)
    except OSError:
        return ()
    return parse_dump(text, thread)


def _stack_file(pid: int) -> str | None:
    """Where that process writes its stacks; who has no such file would die of the signal."""
    caught = Path(f"/proc/{pid}/status").read_text(errors="replace").partition("SigCgt:")[2]
    if not int(caught.split()[0], 16) >> (STACK_SIGNAL - 1) & 1:
        return None
    folder = f"/proc/{pid}/fd"
    files = (f"{folder}/{number}" for number in os.listdir(folder))
    wanted = f"/memfd:{STACK_FILE_NAME} "
    return next((file for file in files if os.readlink(file).startswith(wanted)), None)


def _parent_and_user(pid: int) -> tuple[int, int]:
    """The parent of a process, and whose it is; (0, -1) where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return int(text.rpartition(")")[2].split()[1]), os.stat(f"/proc/{pid}").st_uid
    except (OSError, ValueError, IndexError):
        return 0, -1


def _written_since(path: str, size: int) -> str:
    """What comes to be in the file after ``size`` bytes, once it stops growing."""
    deadline = time.monotonic() + _SECONDS_FOR_A_STACK
    seen = size
    while time.monotonic() < deadline:
        time.sleep(0.05)
        now = os.stat(path).st_size
        if now == seen and now > size:
            break
        seen = now
    with open(path, "rb") as file:
        file.seek(size)
        return file.read().decode(errors="replace")
