"""Python stacks: of this process's training thread, and of a process that does not answer.

The second kind is written by ``faulthandler`` when a signal comes, without the interpreter's help,
so that a rank whose native code never gives it back shows where it is all the same. No rights of a
debugger are needed. The file it goes to has no name: a neighbour opens it through ``/proc``, and
nothing is left behind however the rank ends.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType

from paceline.diagnose.hangs.rank_heartbeat import Frame, PointToPoint

STACK_SIGNAL = signal.SIGUSR2
STACK_FILE_NAME = "paceline-stacks"
_MESSAGE_CALLS = {
    "send": ("dst", "group_dst"),
    "isend": ("dst", "group_dst"),
    "recv": ("src", "group_src"),
    "irecv": ("src", "group_src"),
}


def main_stack() -> tuple[tuple[Frame, ...], PointToPoint | None]:
    """The stack of this process's main thread, outermost first, and the message it waits for."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[Frame] = []
    message = None
    while frame is not None:
        if message is None:
            message = _message(frame)
        code = frame.f_code
        line = frame.f_lineno or 0
        text = linecache.getline(code.co_filename, line).strip()
        frames.append(Frame(code.co_filename, line, code.co_name, text))
        frame = frame.f_back
    frames.reverse()
    return tuple(without_launcher(frames)), message


def _message(frame: FrameType) -> PointToPoint | None:
    """The point-to-point call of torch that ``frame`` is, with its peer as its caller named it."""
    names = _MESSAGE_CALLS.get(frame.f_code.co_name)
    if names is None or not frame.f_code.co_filename.endswith("distributed_c10d.py"):
        return None
    values = frame.f_locals
    peer = next((values[n] for n in names if isinstance(values.get(n), int)), None)
    return PointToPoint(frame.f_code.co_name.removeprefix("i"), peer)


def without_launcher(frames: Iterable[Frame]) -> list[Frame]:
    """The stack without what started the program: our launcher, torch's recorder, runpy."""
    frames = list(frames)
    starters = ("launch/worker.py", "multiprocessing/errors/__init__.py", "runpy.py")
    while frames and (frames[0].file.endswith(starters) or frames[0].file == "<frozen runpy>"):
        frames.pop(0)
    return frames


def prepare_stack_file() -> bool:
    """Have this process write all its stacks when it gets ``STACK_SIGNAL``; whether it will.

    Into a file without a path that a neighbour finds among the files that this process has open.

    Prepared at the first call and kept for the life of the process: a signal that is still on its
    way when the watch has ended must not kill it.
    """
    if not hasattr(os, "memfd_create"):
        return False
    if _prepared.get("pid") != os.getpid():
        if signal.getsignal(STACK_SIGNAL) is not signal.SIG_DFL:
            return False  # a handler of the user's own is left alone
        _prepared["descriptor"] = os.memfd_create(STACK_FILE_NAME)
        _prepared["pid"] = os.getpid()
        faulthandler.register(STACK_SIGNAL, _prepared["descriptor"], all_threads=True)
    # Whoever set one since took the signal over.
    return signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL


_prepared: dict[str, int] = {}


def parse_dump(text: str, thread: int) -> tuple[Frame, ...]:
    """The stack of ``thread`` in the last dump that ``faulthandler`` wrote, outermost first."""
    found: list[Frame] = []
    reading = False
    for line in text.splitlines():
        if head := re.match(r"(?:Current thread|Thread) 0x([0-9a-f]+)", line):
            reading = int(head.group(1), 16) == thread
            found = [] if reading else found
        elif reading and (at := re.match(r'  File "(.*)", line (\d+) in (.*)', line)):
            file, number = at.group(1), int(at.group(2))
            code = linecache.getline(file, number).strip()
            found.append(Frame(file, number, at.group(3), code))
    found.reverse()
    return tuple(without_launcher(found))


@dataclass(frozen=True)
class Spot:
    """What a stack shows the thread to be doing, and the line that says it best.

    ``doing`` is ``collective``, ``message``, ``data``, ``reading``, ``saving``,
    ``compiling`` or ``code``.
    """

    doing: str
    frame: Frame | None

    @property
    def where(self) -> str:
        """``train.py:12 in load_batch``."""
        if self.frame is None:
            return "somewhere"
        return f"{os.path.basename(self.frame.file)}:{self.frame.line} in {self.frame.function}"


_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3[.\d]*/|^<frozen|/src/paceline/")
_COLLECTIVE = re.compile(
    r"torch/distributed/(distributed_c10d|_functional_collectives|fsdp|nn/functional)"
    r"|paceline/world/(agreement|collectives)\.py|torch/autograd/graph\.py"
    r"|torch/nn/parallel/distributed\.py|torch/cuda/(__init__|streams)\.py"
)
_WAIT_IN_CODE = re.compile(r"\.(wait|synchronize|item|cpu|tolist)\(")
_COMPILING = re.compile(r"torch/_(dynamo|inductor)/")
_DATA = re.compile(r"torch/utils/data/|paceline/data/")
_SAVING = re.compile(r"paceline/checkpoint/|torch/distributed/checkpoint/|torch/serialization\.py")
_READING = re.compile(
    r"/(socket|ssl|http/client|urllib/request|subprocess|selectors|pathlib|shutil|gzip|tarfile"
    r"|zipfile)\.py$|/(requests|urllib3|aiohttp|botocore|s3fs|fsspec|httpx|httpcore)/"
)
_DATA_FUNCTIONS = ("__getitem__", "__getitems__", "load_batch", "collate_fn")
# Where the kernel has a thread wait that reads or writes; a plain sleep or a lock is elsewhere.
_KERNEL_IO = re.compile(
    r"pipe_(read|write|wait)|wait_for_partner|fifo_open|sk_wait|wait_woken|inet_|tcp_|unix_stream"
    r"|folio_wait|wait_on_page|io_schedule|nfs|fuse|rpc_wait|bit_wait|blkdev|ext4|xfs|tty_read|n_tty"
)


def spot(stack: Sequence[Frame], *, phase: str = "", kernel: str = "") -> Spot:
    """What the thread with this stack does; ``phase`` and ``kernel`` help where they are known."""
    if not stack:
        return Spot("data" if phase == "data" else "code", None)
    last_own = max((i for i, f in enumerate(stack) if not _LIBRARY.search(f.file)), default=-1)
    shown = stack[last_own]  # without any code of the user's: the innermost frame
    # What the user's code has called; what called the user's code (a hook in a backward) is past.
    called = stack[last_own + 1 :]
    return Spot(_doing(stack, called, phase, kernel), shown)


def _doing(stack: Sequence[Frame], called: Sequence[Frame], phase: str, kernel: str) -> str:
    if any(f.function in _MESSAGE_CALLS and "distributed_c10d" in f.file for f in called):
        return "message"
    if any(_COLLECTIVE.search(f.file) for f in called):
        return "collective"
    if any(_COMPILING.search(f.file) for f in stack):
        return "compiling"
    if phase == "data" or any(_DATA.search(f.file) for f in stack):
        return "data"
    if any(f.function in _DATA_FUNCTIONS for f in stack):
        return "data"
    if any(_SAVING.search(f.file) for f in stack):
        return "saving"
    if _READING.search(stack[-1].file) or _KERNEL_IO.search(kernel):
        return "reading"
    return "collective" if _WAIT_IN_CODE.search(stack[-1].code) else "code"
