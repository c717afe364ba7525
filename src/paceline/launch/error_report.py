"""The error file in which a rank that fails reports the exception to its launcher.

The rank writes it (``write``), the launcher reads it (``read``). Code that knows more about
where the rank was, like the watch for hangs, adds that with ``add_context``. No torch at the
top, since the launcher reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from paceline.errors import PacelineError

# What a collective says when the other side is gone. Gloo raises plain RuntimeErrors, so their
# text is all there is to distinguish them from an error of the rank's own.
_LOST_PEER_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "gloo/transport/",
)
_WORKER_FILE = os.path.join(os.path.dirname(__file__), "worker.py")
_context: list[Callable[[], str]] = []


@dataclass(frozen=True)
class ErrorReport:
    """What a rank that raised has written to its error file."""

    traceback: str
    summary: str
    time: float
    lost_peer: bool
    types: tuple[str, ...]
    context: str = ""
    from_paceline: bool = False


def read(path: Path) -> ErrorReport | None:
    """The report in an error file; ``None`` when there is none."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    message = report["message"]
    return ErrorReport(
        traceback=message["extraInfo"]["py_callstack"],
        summary=message["message"],
        time=report["time"],
        lost_peer=report["lost_peer"],
        types=tuple(report["types"]),
        context=report.get("context", ""),
        from_paceline=report.get("from_paceline", False),
    )


def add_context(describe: Callable[[], str]) -> None:
    """Have what ``describe()`` returns added to the report when this process fails."""
    _context.append(describe)


def remove_context(describe: Callable[[], str]) -> None:
    """Undo ``add_context``."""
    with contextlib.suppress(ValueError):
        _context.remove(describe)


def write(path: str, error: BaseException) -> bool:
    """Write the error file of this rank; false where the disk refuses."""
    now = time.time()
    report = {
        # The agent's own format…
        "message": {
            "message": summary_of(error),
            "extraInfo": {"py_callstack": _traceback(error), "timestamp": str(int(now))},
        },
        # … and what it lacks.
        "time": now,
        "lost_peer": _says_peer_is_lost(error),
        "context": _collect_context(),
        "from_paceline": _is_from_paceline(error),
        "types": [f"{t.__module__}.{t.__qualname__}" for t in type(error).__mro__],
    }
    return write_whole(path, json.dumps(report))


def write_whole(path: str, text: str) -> bool:
    """Write a file that the launcher, which is looking for it, never sees half of.

    Whether that could be done: a disk that is full must not hide why a rank ends.
    """
    try:
        Path(f"{path}.part").write_text(text, encoding="utf-8")
        os.rename(f"{path}.part", path)
    except OSError:
        return False
    return True


def summary_of(error: BaseException) -> str:
    """The exception as one short text: its type and what it says."""
    # A syntax error comes with the place, in indented lines before its name.
    parts = traceback.format_exception_only(error)
    return "".join(part for part in parts if not part.startswith(" ")).strip()


def own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of the worker, torch's recorder and runpy at its top."""
    ours = (_WORKER_FILE, runpy.__file__, "<frozen runpy>")
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file not in ours and not file.endswith("elastic/multiprocessing/errors/__init__.py"):
            break
        trace = trace.tb_next
    return trace


def _collect_context() -> str:
    """Everything there is to add, a line each; one that fails adds nothing."""
    lines = []
    for describe in _context:
        # The error that ends the rank counts, not one that comes up while reporting it.
        with contextlib.suppress(Exception):
            lines.append(describe())
    return "\n".join(line for line in lines if line)


def _traceback(error: BaseException) -> str:
    shown = error.with_traceback(own_frames(error.__traceback__))
    return "".join(traceback.format_exception(shown)).rstrip()


def _is_from_paceline(error: BaseException) -> bool:
    """Whether Paceline raised it, and nobody else's code led there, nor to what caused it.

    Torch and ``contextlib`` may lie in between: they only pass on a call of Paceline's.
    """
    if not isinstance(error, PacelineError):
        return False
    import torch

    own = f"{Path(__file__).parents[1]}{os.sep}"
    allowed = (own, f"{Path(torch.__file__).parent}{os.sep}", contextlib.__file__)
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        frames = traceback.walk_tb(own_frames(link.__traceback__))
        files = [frame.f_code.co_filename for frame, _ in frames]
        if not files or not files[-1].startswith(own):
            return False
        if not all(file.startswith(allowed) for file in files):
            return False
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return True


def _says_peer_is_lost(error: BaseException) -> bool:
    """Whether an error, or one that led to it, only reports that another rank is gone."""
    from torch.distributed import DistError

    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        if isinstance(link, DistError):
            return True
        if isinstance(link, RuntimeError) and any(t in str(link) for t in _LOST_PEER_TEXTS):
            return True
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return False
