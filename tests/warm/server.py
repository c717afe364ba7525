"""The process that others are forked from, and what becomes of those.

A new process is forked twice: what it is forked from ends at once, and Linux hands the orphan to
the client that asked, which has declared itself ready to take it. So it is the client's own child.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import os
import platform
import random
import runpy
import signal
import socket
import struct
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Sequence
from typing import Any

from warm.order import Order, receive

PID = struct.Struct("!i")
_ROOM = 100_000
_ROOM_NAME = "WARM_ROOM"
PRELOAD = (
    *("torch", "torch._dynamo", "torch.distributed.elastic.agent.server.api", "cloudpickle"),
    *(
        "paceline.cli",
        "paceline.launch.agent",
        "paceline.launch.local",
        "paceline.launch.rendezvous.multi_node",
    ),
    *("paceline.trainer.run", "paceline.models.gpt", "paceline.testing", "paceline.testing.rank"),
)
# Run as __main__ by what is forked: one that is there already would be in the way.
_RUN_AS_MAIN = ("paceline.trainer.run", "paceline.launch.worker", "paceline.testing.server")
# These start nothing in Python, or only what they fork themselves.
_STARTS_NOTHING = ("paceline.launch.worker", "paceline.testing.server")
_TAKEN_APART = (
    *("__main__", "paceline", "torch.distributed", "warm", "builtins", "sys", "os", "io", "_"),
    *("threading", "logging", "asyncio", "socket", "subprocess", "multiprocessing", "concurrent"),
    *("tempfile", "weakref", "gc", "queue", "selectors", "signal", "atexit", "contextlib"),
)
_libraries: set[str] = set()
_SET_PARENT_DEATH_SIGNAL = 1
_MOUNTS = 0x20000  # CLONE_NEWNS
_ALL_PRIVATE = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE
_libc = ctypes.CDLL(None, use_errno=True)


def main(control: int, base_path: list[str]) -> None:
    """Serve until the client is gone. In a process that was asked for: be it, then return."""
    atexit.register(_leave_libraries_alone)  # before any library's own: so it runs after them
    gc.disable()  # there is no garbage yet, and looking for it takes a while
    for name in PRELOAD:
        importlib.import_module(name)
    gc.enable()
    for name in _RUN_AS_MAIN:
        sys.modules.pop(name, None)
    _libraries.update(name for name in sys.modules if not name.startswith(_TAKEN_APART))
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("warm starts: some library has started a thread, so nothing can be forked.")
    gc.collect()
    gc.freeze()  # collections then leave alone, and so shared, what is imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for those who started this
    order, files = _serve(socket.socket(fileno=control))
    while True:
        _enter(order)
        if order.target in _STARTS_NOTHING:
            break
        found = _with_server_of_its_own(files)
        if found is None:
            break
        order, files = found  # this is what that server has forked
    _take_place(order, files, base_path)
    _run(order)


def _serve(line: socket.socket) -> tuple[Order, list[int]]:
    """Fork what the client asks for. Returns only in what was forked."""
    line.sendall(PID.pack(os.getpid()))
    while (received := receive(line)) is not None:
        order, files = received
        reading, writing = os.pipe()
        go_between = os.fork()
        if go_between == 0:
            between = os.getpid()
            child = os.fork()
            if child:
                os.write(writing, PID.pack(child))
                os._exit(0)
            line.close()
            os.close(reading)
            os.close(writing)
            while os.getppid() == between:
                time.sleep(0.0002)
            return order, files
        os.close(writing)
        os.waitpid(go_between, 0)  # from now on the client is the parent
        line.sendall(os.read(reading, PID.size))
        os.close(reading)
        for file in files:
            os.close(file)
    os._exit(0)


def _with_server_of_its_own(files: Sequence[int]) -> tuple[Order, list[int]] | None:
    """Fork one for what this process will start, while there is no thread in it yet."""
    from warm import popen

    ours, theirs = socket.socketpair()
    owner = os.getpid()
    if os.fork() == 0:
        ours.close()
        _libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != owner:
            os._exit(0)
        for file in files:
            os.close(file)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        os.close(nothing)
        return _serve(theirs)
    theirs.close()
    popen.use(ours)
    return None


def _enter(order: Order) -> None:
    """The namespaces, as ``nsenter`` and ``unshare --mount`` would."""
    opened = [os.open(path, os.O_RDONLY) for path in order.namespaces]
    for file in opened:
        if _libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)
    if order.own_mounts:
        if _libc.unshare(_MOUNTS) or _libc.mount(b"none", b"/", None, _ALL_PRIVATE, None):
            raise OSError(ctypes.get_errno(), "unshare")
        order.own_mounts = False
    if order.namespaces:
        platform._uname_cache = None  # it knows the name of the machine it was first asked on
        order.namespaces = []


def _take_place(order: Order, files: Sequence[int], base_path: list[str]) -> None:
    """Everything that a new process has from whoever started it."""
    if order.new_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order.env)
    _show_in_proc(order)
    _place_files(order.targets, files)
    os.chdir(order.cwd)
    _open_streams(order.unbuffered)
    front = [os.getcwd()] if order.kind == "-m" else [""]
    if order.kind == "script":
        front = [os.path.dirname(os.path.realpath(order.target))]
    more = [part for part in order.env.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [*([] if order.safe_path else front), *map(os.path.abspath, more), *base_path]
    sys.orig_argv[:] = order.command
    sys.argv[:] = [order.target if order.kind == "script" else order.kind, *order.arguments]
    if chosen := order.env.get("PYTHONWARNINGS"):
        sys.warnoptions[:] = chosen.split(",")
        warnings._processoptions(sys.warnoptions)  # as Python does, on start
    _what_is_read_on_loading()
    _end_after_python()
    sys.excepthook = _hook


def _leave_libraries_alone() -> None:
    """Have the interpreter not take libraries apart, object by object, when it ends.

    It would touch, and so copy, most of the memory that is shared with the server: half a second.
    What may hold the program's own things is taken apart as ever: its modules, Paceline,
    ``torch.distributed`` with its process groups, threads, sockets, loggers.
    """
    kept = {name: sys.modules[name] for name in _libraries & sys.modules.keys()}
    for name in kept:
        sys.modules[name] = None  # type: ignore[assignment]  # as the interpreter does
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _end_after_python() -> None:
    """Have the process end with the interpreter, before C++ takes torch's tables of operators apart.

    That takes a quarter of a second, for the same reason. ``_exit(status)`` is called first of all
    that is registered for the end.
    """
    _libc.on_exit(_libc._exit, None)


def _what_is_read_on_loading() -> None:
    """What libraries take from the environment, or from chance, when they are loaded."""
    import torch
    import torch.distributed as dist

    threads = os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
    torch.set_num_threads(int(threads))
    if dist.is_available():
        dist.set_debug_level_from_env()
    random.seed()
    torch.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    importlib.invalidate_caches()
    tempfile.tempdir = None  # TMPDIR, which some library has asked for


def _place_files(targets: Sequence[int], files: Sequence[int]) -> None:
    import fcntl

    apart = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max([100, *targets]) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, target in zip(apart, targets, strict=True):
        os.dup2(file, target)
        os.close(file)


def _open_streams(unbuffered: bool) -> None:
    """The standard streams, as Python itself opens them."""
    sys.stdin = sys.__stdin__ = open(0, errors=sys.stdin.errors, closefd=False)  # noqa: SIM115
    # How it treats what it cannot encode is up to the locale.
    for number, name, errors in (
        (1, "stdout", sys.stdout.errors),
        (2, "stderr", sys.stderr.errors),
    ):
        raw = io.FileIO(number, "w", closefd=False)
        stream = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),  # type: ignore[arg-type]
            encoding="utf-8",
            errors=errors,
            line_buffering=not unbuffered and (number == 2 or raw.isatty()),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def room() -> tuple[str, dict[str, str]]:
    """A last argument and a variable to start a server with: room for those of what it forks."""
    return " " * _ROOM, {_ROOM_NAME: " " * _ROOM}


def _show_in_proc(order: Order) -> None:
    """Have /proc tell this process's command line and environment, not the server's."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    first_word, last_word, first_variable, last_variable = map(int, fields[45:49])
    words = b"".join(os.fsencode(word) + b"\0" for word in order.command)
    _overwrite(first_word, last_word, words)
    # Only where room was made for it: C code may still point into the rest.
    block = ctypes.string_at(first_variable, last_variable - first_variable)
    start = first_variable + block.index(_ROOM_NAME.encode())
    entries = b"".join(os.fsencode(f"{k}={v}") + b"\0" for k, v in order.env.items())
    _overwrite(start, start + _ROOM, entries)


def _overwrite(start: int, end: int, content: bytes) -> None:
    size = end - start
    ctypes.memmove(start, content[: size - 1].ljust(size, b"\0"), size)


def _hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    trace = trace and trace.tb_next  # the first is what the server was started with
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _run(order: Order) -> None:
    """As ``python`` would: what is raised from here on meets the interpreter's own end."""
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    program.__dict__["__builtins__"] = __builtins__
    if order.kind == "-m":
        runpy._run_module_as_main(order.target)
        return
    if order.kind == "script":
        program.__file__ = os.path.abspath(order.target)
        with open(order.target, "rb") as file:
            code = compile(file.read(), order.target, "exec")
    else:
        code = compile(order.target, "<string>", "exec")
    exec(code, program.__dict__)
