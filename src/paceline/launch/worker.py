"""What each rank runs: ``python -m paceline.launch.worker`` followed by one of

- ``script FILE ARGS…``   a script, as ``python FILE ARGS…`` would run it;
- ``-m MODULE ARGS…``     a module, as ``python -m MODULE ARGS…`` would run it;
- ``--call PAYLOAD``      a function that ``paceline.launch.local.call`` put there.

``--backend NAME`` before one of them: make the process ready for a script that was written for
another library (``paceline.compat.backends``).

Around it: the rank dies with its launcher, both output streams go to one log in the order they
were written, and an error is recorded with its traceback before the rank leaves.

``--standby FD`` before all that: import what takes long, report that on the socket FD, and wait
there for the order to become a rank; from then on it is like one that was just started.
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
from pathlib import Path
from types import FrameType
from typing import NoReturn

from paceline.errors import LaunchError
from paceline.launch import error_report, exit_codes, notices
from paceline.launch.environment import ERROR_FILE, LOG_FILE
from paceline.launch.launchers import LAUNCHER_PID
from paceline.launch.rank_output import one_log_for_both_streams

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_SECONDS = 0.5
_TRAINER_RUN = "paceline.trainer.run"
_BACKENDS = "paceline.compat.backends"  # by name: it lies above the launcher
_LOADING_PRIORITY = 10  # "nice": about a tenth of a core that others want as well


def main(arguments: list[str]) -> None:
    """Run one rank, at once or when the launcher says so."""
    if arguments[0] == "--standby":
        arguments = _stand_by(int(arguments[1]), arguments[2:])
    _die_with_launcher()
    notices.do_not_inherit()
    one_log_for_both_streams(os.environ[LOG_FILE])
    faulthandler.enable()  # into the log: where native code was when it gave up
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # nothing to save before there is a trainer
    # The import takes seconds. A Ctrl-C in the middle of it has nothing to save: leave at once.
    handlers = {s: signal.signal(s, _leave) for s in (signal.SIGINT, signal.SIGTERM)}
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

    from paceline.ddp_teardown import free_reducers_before_groups

    class Handler(ErrorHandler):
        """Writes what ``paceline.launch.error_report.read`` reads."""

        def record_exception(self, e: BaseException) -> None:
            _write_error(e)

    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    free_reducers_before_groups()
    try:
        record(_run, error_handler=Handler())(arguments)
    except Exception as error:
        own = error_report.own_frames(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(own), own)
        sys.exit(1)
    except KeyboardInterrupt:
        _write_quiet_point()
        raise
    except SystemExit as leaving:
        _note_exit(leaving)
        raise


def _stand_by(line_number: int, command: list[str]) -> list[str]:
    """Wait to become a rank; returns the arguments that the launcher sends for it."""
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
    rank = json.loads(order)
    os.environ.clear()
    os.environ.update(rank["env"])
    if rank["cwd"] is not None:
        os.chdir(rank["cwd"])
    arguments: list[str] = rank["arguments"]
    sys.argv[1:] = arguments
    sys.orig_argv[sys.orig_argv.index("--standby") :] = arguments
    return arguments


def _load(command: list[str]) -> None:
    """Import what every rank does, and what a run of the trainer does, at a low priority.

    In a thread of its own, because a priority once lowered is not raised again without privileges.
    For a script nothing more than torch: a module beside it may have the name of one of ours.
    """
    own = os.getpriority(os.PRIO_PROCESS, 0)
    if sys.platform == "linux" and own < _LOADING_PRIORITY:
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
            os.setpriority(os.PRIO_PROCESS, int(thread), own)


def prepare_for(backend: str) -> None:
    """Make this process ready for a script that was written for ``backend``."""
    importlib.import_module(_BACKENDS).prepare_rank(backend)


def _run(arguments: list[str]) -> None:
    if arguments[0] == "--backend":
        prepare_for(arguments[1])
        arguments = arguments[2:]
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
        call_payload(Path(target))
    else:
        raise ValueError(f"worker: {kind!r} must be script, -m or --call.")


def call_payload(folder: Path) -> None:
    """Load the function, run it, and leave rank 0's return value beside it."""
    caller = json.loads((folder / "caller.json").read_text())
    sys.path[:] = caller["path"]
    sys.argv = caller["argv"]
    import cloudpickle

    try:
        function = cloudpickle.loads((folder / "function.pkl").read_bytes())
    except Exception as error:
        raise LaunchError(
            f"this rank could not load what the caller sent it ({error_report.summary_of(error)}). "
            "Modules that the function, its model or its data come from must be importable here as "
            "well."
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
    if os.getppid() != launcher:  # it died before we asked for the signal
        os._exit(1)


def _watch_parent(launcher: int) -> NoReturn:
    while os.getppid() == launcher:
        time.sleep(_PARENT_CHECK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + signum)


def _write_error(error: BaseException) -> None:
    _write_quiet_point()
    if not error_report.write(os.environ[ERROR_FILE], error):
        summary = error_report.summary_of(error)
        notices.send(f"rank {os.environ.get('RANK', '?')} failed: {summary}")


def _note_exit(leaving: SystemExit) -> None:
    """Mark an exit that the program chose, unless its code says so already."""
    if leaving.code not in (None, 0, exit_codes.INTERRUPTED, *exit_codes.SAVED_AND_LEFT):
        error_report.write_whole(f"{os.environ[ERROR_FILE]}.exit", "")


def _write_quiet_point() -> None:
    """Note how far this rank's output goes that the console should still show.

    Written before the traceback goes to the log: the launcher shows that one itself, at the end.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    error_report.write_whole(f"{os.environ[ERROR_FILE]}.quiet", str(os.fstat(1).st_size))


if __name__ == "__main__":
    main(sys.argv[1:])
