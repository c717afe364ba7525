"""What one live rank does: wait for a job, run it, report, clean up, wait again."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import pickle
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from paceline.launch.environment import read_environment
from paceline.testing.isolation import ProcessSnapshot
from paceline.testing.processes import children
from paceline.testing.protocol import STACK_SIGNAL, JobOutcome, PoolJob
from paceline.world import World
from paceline.world.joining import forget_stores, lend_store
from paceline.world.world import leave

_SECONDS_FOR_CHILDREN_TO_END = 2.0

_traces: set[str] = set()
"""What jobs have done here that cannot be undone; the next job gets a fresh rank."""


def serve(descriptor: int, folder: str, store_port: int) -> None:
    """Run jobs from the socket ``descriptor`` until the pool closes it.

    Worlds are joined through one connection to the pool's store, made here and kept: a new one for
    each job would cost a name lookup inside torch, which may take seconds.
    """
    connection = Connection(descriptor)
    output = _redirect_output(Path(folder) / f"{os.getpid()}.out")
    stacks = open(Path(folder) / f"{os.getpid()}.stack", "wb", buffering=0)  # noqa: SIM115
    faulthandler.enable(stacks)  # says where a segmentation fault happened
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
    torch.set_num_threads(1)
    _watch_for_meshes()
    store = TCPStore("127.0.0.1", store_port, is_master=False, wait_for_workers=False)
    snapshot = ProcessSnapshot()
    while True:
        try:
            job: PoolJob = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        os.ftruncate(output, 0)
        os.dup2(output, 1)  # the last job may have redirected them
        os.dup2(output, 2)
        connection.send_bytes(pickle.dumps(_run(job, store)))
        # Stay connected until every rank is through: a peer may still need this one.
        try:
            connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(pickle.dumps(_clean_up(snapshot)))


def _watch_for_meshes() -> None:
    """Note when a job makes a DeviceMesh.

    DTensor caches what it computed for a mesh, groups included, for the life of the process: in a
    later job it would look for process groups that are gone.
    """
    original = DeviceMesh.__init__

    @functools.wraps(original)
    def init(self: DeviceMesh, *arguments: Any, **options: Any) -> None:
        _traces.add("a DeviceMesh")
        original(self, *arguments, **options)

    DeviceMesh.__init__ = init  # type: ignore[method-assign]


def _redirect_output(path: Path) -> int:
    """Everything this process and its libraries print goes to a file the pool can read."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = os.fdopen(os.dup(descriptor), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(descriptor), "w", buffering=1)
    return descriptor


def _run(job: PoolJob, store: TCPStore) -> JobOutcome:
    process = os.getpid()
    try:
        os.environ.clear()
        os.environ.update(job.environ)
        os.chdir(job.folder)
        sys.path[:] = job.path
        function, arguments = pickle.loads(job.call)
        if job.join:
            place = read_environment()
            assert place is not None
            lend_store(place, PrefixStore(f"job/{job.number}", store))
            World.init(device=job.device, timeout=job.timeout, share_gpu=job.share_gpu)
        result = function(*arguments)
        if os.getpid() != process:
            os._exit(0)  # a child that the job forked came back from it: only its parent reports
        return JobOutcome(result=_pickled_result(result))
    except BaseException as error:  # a job may raise anything, SystemExit too; the rank lives on
        if os.getpid() != process:
            traceback.print_exc()
            os._exit(1)
        now = time.monotonic()
        outcome = JobOutcome(
            error=_pickled_error(error),
            summary="".join(traceback.format_exception_only(error)).strip(),
            traceback=_own_traceback(error),
            time=now,
        )
        # The other ranks learn at once that this one is gone, instead of waiting for it. If that
        # fails, cleaning up will fail the same way, and say so.
        with contextlib.suppress(RuntimeError):
            _leave_world(failed=True)
        return outcome
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _pickled_result(result: Any) -> bytes:
    try:
        return cloudpickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(result).__name__} that cannot be sent back: {error}. "
            "Return tensors, numbers, strings, or containers of them."
        ) from error


def _pickled_error(error: BaseException) -> bytes | None:
    """The error itself, where it survives the journey; its words always do."""
    try:
        data = cloudpickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _own_traceback(error: BaseException) -> str:
    """The traceback without the frames of the pool itself."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _leave_world(*, failed: bool = False) -> None:
    leave(failed=failed)
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_stores()


def _clean_up(snapshot: ProcessSnapshot) -> tuple[list[str], bool]:
    """Make the rank as it was; the processes left behind, and whether it can take another job."""
    # DDP's reducer is destroyed with the GIL held. Were it the last to hold a process group, it
    # would wait for Gloo's threads, one of which may be waiting for the GIL to end its last work.
    gc.collect()
    _leave_world()
    snapshot.restore()
    gc.collect()  # models and loaders in cycles hold sockets and worker processes
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # the GPU is not this rank's alone
    deadline = time.monotonic() + _SECONDS_FOR_CHILDREN_TO_END
    while _own_children() and time.monotonic() < deadline:
        time.sleep(0.01)
    processes = [f"process {pid} ({name})" for pid, name in _own_children().items()]
    # A thread that goes on may be a library's helper: no fault, but nobody knows what it will do.
    _traces.update(snapshot.new_threads())
    return processes, not processes and not _traces


def _own_children() -> dict[int, str]:
    """The processes that the job started; torch.compile's helpers stay, and end with the rank."""
    return {pid: name for pid, name in children().items() if _COMPILE_WORKER not in name}


_COMPILE_WORKER = "torch/_inductor/compile_worker"
