"""The doctor's helper process: ``python -m paceline.doctor.probe``, which imports torch once.

Reads jobs as JSON lines, runs each in a forked process of its own (a crash or a hang in Gloo, NCCL
or the user's model is then nobody else's), and writes results as JSON lines. Ends, with all that it
started, when its input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from paceline.doctor.jobs import JOBS

_POLL_S = 0.05


@dataclass
class _RunningJob:
    job: Any
    pid: int
    pipe: int
    deadline: float
    output: bytearray = field(default_factory=bytearray)


def main() -> None:
    """Serve jobs until standard input ends."""
    # What the user's code prints must not be taken for a result.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    running: dict[int, _RunningJob] = {}
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    _say(results, {"id": None, "result": _hello()})
    try:
        _serve(results, selector, running)
    finally:
        for one in running.values():
            _kill(one.pid)


def _serve(results: Any, selector: selectors.BaseSelector, running: dict[int, _RunningJob]) -> None:
    pending = b""
    while True:
        for key, _ in selector.select(_POLL_S):
            data = os.read(key.fd, 65536)
            if key.fd != 0:
                one = running[key.fd]
                one.output += data
                if not data:
                    _finish(results, selector, running, one)
                continue
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                one = _start(json.loads(line))
                running[one.pipe] = one
                selector.register(one.pipe, selectors.EVENT_READ)
        for one in list(running.values()):
            if time.monotonic() > one.deadline:
                _kill(one.pid)
                one.output[:] = _error(f"no result within {one.job['timeout']:g} s")
                _finish(results, selector, running, one)


def _start(job: dict[str, Any]) -> _RunningJob:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _run(JOBS[job["job"]], job, write)
    os.close(write)
    return _RunningJob(job, pid, read, time.monotonic() + job["timeout"])


def _run(function: Callable[..., Any], job: dict[str, Any], write: int) -> NoReturn:
    """In the forked process: do the job, write what came of it, and be gone."""
    # The parent reads jobs from this: the child must not keep it, nor read from it.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        output = json.dumps(function(**job["arguments"])).encode()
    except BaseException as error:
        text = str(error).strip()
        first = text.splitlines()[0] if text else "no message"
        output = _error(f"{type(error).__name__}: {first}")
    with os.fdopen(write, "wb") as file:
        file.write(output)
    os._exit(0)  # no destructors of Gloo or CUDA, which may wait for peers


def _finish(
    results: Any,
    selector: selectors.BaseSelector,
    running: dict[int, _RunningJob],
    one: _RunningJob,
) -> None:
    selector.unregister(one.pipe)
    os.close(one.pipe)
    del running[one.pipe]
    _, status = os.waitpid(one.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if not one.output:
        why = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        one.output[:] = _error(f"its process died ({why})")
    _say(results, {"id": one.job["id"], "result": json.loads(bytes(one.output))})


def _hello() -> dict[str, str]:
    """The versions of torch and its parts in this process."""
    import torch

    nccl = ""
    # Not torch.cuda.is_available(): it wakes the driver, which does not survive a fork.
    if torch.version.cuda is not None:
        with contextlib.suppress(Exception):  # built without it
            nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    return {"torch": torch.__version__, "cuda": torch.version.cuda or "", "nccl": nccl}


def _say(results: Any, message: dict[str, Any]) -> None:
    results.write(json.dumps(message) + "\n")
    results.flush()


def _error(text: str) -> bytes:
    return json.dumps({"error": text}).encode()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)
