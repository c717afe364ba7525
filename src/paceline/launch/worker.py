"""What each rank runs: ``python -m paceline.launch.worker`` followed by one of

- ``script FILE ARGS…``   a script, as ``python FILE ARGS…`` would run it;
- ``-m MODULE ARGS…``     a module, as ``python -m MODULE ARGS…`` would run it;
- ``--call PAYLOAD``      a function that :func:`paceline.launch.local.call` put there.

Around it: the rank dies with its launcher, both output streams go to one log in the order they
were written, and an error is recorded with its traceback before the rank leaves.

``--standby FD`` before all that: load what takes long, say so on the socket FD, and wait there for
the order to become a rank; from then on it is as one that was just started.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from paceline.errors import LaunchError, PacelineError
from paceline.launch import codes, last_words, notices
from paceline.launch.rank_output import one_log_for_both_streams

# Set by the launcher, see agent.py.
LAUNCHER_PID = "PACELINE_LAUNCHER_PID"
LOG_FILE = "PACELINE_LOG_FILE"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # the agent's own name for it

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_SECONDS = 0.5
_TRAINER_RUN = "paceline.trainer.run"
_LOADING_PRIORITY = 10  # "nice": about a tenth of a core that others want as well
# What a collective says when the other side is gone. Gloo raises plain RuntimeErrors, so their
# text is all there is to tell them from an error of the rank's own.
_LOST_PEER_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "gloo/transport/",
)


def main(arguments: list[str]) -> None:
    """Run one rank, at once or when told to."""
    if arguments[0] == "--standby":
        arguments = _stand_by(int(arguments[1]), arguments[2:])
    _die_with_launcher()
    notices.keep_to_oneself()
    one_log_for_both_streams(os.environ[LOG_FILE])
    faulthandler.enable()  # into the log: where native code was when it gave up
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # nothing to save before there is a trainer
    # The import takes seconds. A Ctrl-C in the middle of it has nothing to save: leave at once.
    handlers = {s: signal.signal(s, _leave) for s in (signal.SIGINT, signal.SIGTERM)}
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

    class Handler(ErrorHandler):
        """Writes what :func:`paceline.launch.failure.read_error` reads."""

        def record_exception(self, e: BaseException) -> None:
            _write_error(e)

    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    try:
        record(_run, error_handler=Handler())(arguments)
    except Exception as error:
        own = _own_frames(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(own), own)
        sys.exit(1)
    except KeyboardInterrupt:
        _write_quiet_point()
        raise
    except SystemExit as leaving:
        _note_exit(leaving)
        raise


def _stand_by(line_number: int, command: list[str]) -> list[str]:
    """Be ready to become a rank; the arguments to run it with, once the launcher has sent them."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    _die_with_launcher()
    loading = threading.Thread(target=_load, args=(command,))
    loading.start()
    loading.join()
    with socket.socket(fileno=line_number) as line, line.makefile("rb") as orders:
        line.sendall(b"ready\n")
        order = orders.readline()
        if not order.endswith(b"\n"):  # the launcher has no use for this process any more
            os._exit(0)
        line.sendall(b"taken\n")
    place = json.loads(order)
    os.environ.clear()
    os.environ.update(place["env"])
    if place["cwd"] is not None:
        os.chdir(place["cwd"])
    arguments: list[str] = place["arguments"]
    sys.argv[1:] = arguments
    sys.orig_argv[sys.orig_argv.index("--standby") :] = arguments
    return arguments


def _load(command: list[str]) -> None:
    """Import what every rank does, and what a run of the trainer does, at a low priority.

    In a thread of its own, because a priority once lowered is not raised again without privileges.
    For a script nothing more than torch: a module beside it may have the name of one of ours.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOADING_PRIORITY)
    importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
    if command[:2] == ["-m", _TRAINER_RUN] or command[0] == "--call":
        importlib.import_module("torch._dynamo")  # which optimizers import on first use
        importlib.import_module(_TRAINER_RUN)
        # It is run as __main__ later on; a module that is already there would be in the way.
        del sys.modules[_TRAINER_RUN]
    # Libraries may have started threads, which have inherited the priority.
    for thread in os.listdir("/proc/self/task") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # not allowed: it only affects their helpers
            os.setpriority(os.PRIO_PROCESS, int(thread), 0)


def _run(arguments: list[str]) -> None:
    kind, target, *rest = arguments
    if kind == "script":
        sys.argv = [target, *rest]
        sys.path.insert(0, str(Path(target).resolve().parent))
        # Python makes __file__ of a script absolute, runpy does not.
        runpy.run_path(os.path.abspath(target), run_name="__main__")
    elif kind == "-m":
        sys.argv = [target, *rest]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif kind == "--call":
        _call(Path(target))
    else:
        raise ValueError(f"worker: {kind!r} must be script, -m or --call.")


def _call(folder: Path) -> None:
    """Load the function, run it, and leave rank 0's return value beside it."""
    caller = json.loads((folder / "caller.json").read_text())
    sys.path[:] = caller["path"]
    sys.argv = caller["argv"]
    import cloudpickle

    try:
        function = cloudpickle.loads((folder / "function.pkl").read_bytes())
    except Exception as error:
        raise LaunchError(
            f"this rank could not load what the caller sent it ({_summary(error)}). Modules that "
            "the function, its model or its data come from must be importable here as well."
        ) from error
    value = function()
    if os.environ["RANK"] == "0":
        part = folder / "value.part"
        part.write_bytes(cloudpickle.dumps(value))
        part.rename(folder / "value.pkl")


def _die_with_launcher() -> None:
    """No rank outlives its launcher, not even one killed by SIGKILL."""
    launcher = int(os.environ[LAUNCHER_PID])
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=_watch_parent, args=(launcher,), daemon=True).start()
    if os.getppid() != launcher:  # it died before we asked to be told
        os._exit(1)


def _watch_parent(launcher: int) -> NoReturn:
    while os.getppid() == launcher:
        time.sleep(_PARENT_CHECK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + signum)


def _write_error(error: BaseException) -> None:
    """Write the error file that the agent and :mod:`paceline.launch.failure` read."""
    now = time.time()
    report = {
        # The agent's own format…
        "message": {
            "message": _summary(error),
            "extraInfo": {"py_callstack": _traceback(error), "timestamp": str(int(now))},
        },
        # … and what it lacks.
        "time": now,
        "lost_peer": _says_peer_is_lost(error),
        "last_words": last_words.collect(),
        "from_paceline": _is_from_paceline(error),
        "types": [f"{t.__module__}.{t.__qualname__}" for t in type(error).__mro__],
    }
    _write_quiet_point()
    if not _write_whole(os.environ[ERROR_FILE], json.dumps(report)):
        notices.tell(f"rank {os.environ.get('RANK', '?')} failed: {_summary(error)}")


def _note_exit(leaving: SystemExit) -> None:
    """Tell an exit that the program chose from one that hit it, unless the code says it already."""
    if leaving.code not in (None, 0, codes.INTERRUPTED, *codes.SAVED_AND_LEFT):
        _write_whole(f"{os.environ[ERROR_FILE]}.exit", "")


def _write_quiet_point() -> None:
    """Note how far this rank's output goes that the console should still show.

    Written before the traceback goes to the log: the launcher shows that one itself, at the end.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    _write_whole(f"{os.environ[ERROR_FILE]}.quiet", str(os.fstat(1).st_size))


def _write_whole(path: str, text: str) -> bool:
    """Write a file that the launcher, which is looking for it, never sees half of.

    Whether that could be done: a disk that is full must not hide why a rank ends.
    """
    try:
        Path(f"{path}.part").write_text(text, encoding="utf-8")
        os.rename(f"{path}.part", path)
    except OSError:
        return False
    return True


def _summary(error: BaseException) -> str:
    # A syntax error comes with the place, in indented lines before its name.
    parts = traceback.format_exception_only(error)
    return "".join(part for part in parts if not part.startswith(" ")).strip()


def _traceback(error: BaseException) -> str:
    shown = error.with_traceback(_own_frames(error.__traceback__))
    return "".join(traceback.format_exception(shown)).rstrip()


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this file, torch's recorder and runpy at its top."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file not in ours and not file.endswith("elastic/multiprocessing/errors/__init__.py"):
            break
        trace = trace.tb_next
    return trace


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
        frames = traceback.walk_tb(_own_frames(link.__traceback__))
        files = [frame.f_code.co_filename for frame, _ in frames]
        if not files or not files[-1].startswith(own):
            return False
        if not all(file.startswith(allowed) for file in files):
            return False
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return True


def _says_peer_is_lost(error: BaseException) -> bool:
    """Whether an error, or one that led to it, only tells that another rank is gone."""
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


if __name__ == "__main__":
    main(sys.argv[1:])
