"""Speaking for a rank that cannot speak for itself, from another process on its machine.

Looks at ``/proc`` and, where the rank has prepared for it, has ``faulthandler`` write its stack.
Needs no rights but those of the same user.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from paceline.diagnose.hangs.board import Board
from paceline.diagnose.hangs.report import GONE, LEFT, SILENT, STOPPED, Beat, Frame, Report
from paceline.diagnose.hangs.stacks import STACK_SIGNAL, parse_dump

_SECONDS_FOR_A_STACK = 0.5


def answer_for_neighbours(board: Board, question: int, ranks: Iterable[int]) -> None:
    """Answer for those of ``ranks`` on this machine that have not answered."""
    host = socket.gethostname()
    beats = board.beats(set(ranks) - board.answered(question, ranks))
    for rank, beat in beats.items():
        if beat.host == host:
            report = report_on(beat)
            # It may have found its voice in the meantime: then its own words count.
            if rank not in board.answered(question, [rank]):
                board.answer(question, report)


def report_on(beat: Beat, *, stack: bool = True) -> Report:
    """What can be seen from outside of the process behind ``beat``, with or without its stack."""
    state = LEFT if beat.left else _process_state(beat.pid)
    speechless = state == SILENT
    return beat.report(
        state=state,
        stack=_stack_of(beat) if speechless and stack else (),
        kernel=kernel_function(beat.pid) if speechless else "",
        disk=speechless and main_thread_state(beat.pid) == "D",
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


def _stack_of(beat: Beat) -> tuple[Frame, ...]:
    """Ask the process for its stacks by signal; empty when it has not prepared for that."""
    if not beat.stack_file:
        return ()
    try:
        before = os.stat(beat.stack_file).st_size
        os.kill(beat.pid, STACK_SIGNAL)
        text = _written_since(beat.stack_file, before)
    except OSError:
        return ()
    return parse_dump(text, beat.main_thread)


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
