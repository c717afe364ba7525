"""The doctor's hold on its helper process: jobs in, results out, and nothing left behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as TooLate
from typing import Any

from paceline.launch.process_reaper import ProcessReaper, end_groups

_IMPORT_TIMEOUT_S = 120.0  # torch from a cold network disk
_SLACK_S = 5.0


class Prober:
    """Starts the process at once; ``hello`` and jobs are waited for when they are needed."""

    def __init__(self) -> None:
        self._guard = ProcessReaper()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "paceline.doctor.probe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ},
            start_new_session=True,  # Ctrl-C is for the doctor, which ends it
        )
        self._guard.watch([self._process.pid])
        self._ids = itertools.count()
        self._waiting: dict[int | None, Future[dict[str, Any]]] = {None: Future()}
        self._last_words: list[str] = []
        self._over = False
        self._turn = threading.Lock()
        self._readers = [
            threading.Thread(target=target, name="paceline-probe", daemon=True)
            for target in (self._read_results, self._read_errors)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def hello(self) -> dict[str, Any]:
        """Versions of torch, CUDA and NCCL; or ``{"error": why there are none}``."""
        return self.wait_for(self._waiting[None], _IMPORT_TIMEOUT_S)

    def submit(self, job: str, timeout: float, **arguments: Any) -> ProbeJob:
        """Ask for a job of ``paceline.doctor.jobs``."""
        number = next(self._ids)
        future: Future[dict[str, Any]] = Future()
        with self._turn:
            if self._over:
                future.cancel()
            self._waiting[number] = future
        line = {"id": number, "job": job, "timeout": timeout, "arguments": arguments}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            future.cancel()
        return ProbeJob(self, future, timeout)

    def close(self) -> None:
        """End the process and whatever it started."""
        group = self._process.pid
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            end_groups([group], patience=0.5)
        else:
            end_groups([group], patience=0)
        self._process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
        self._guard.forget([group])
        self._guard.close()

    def wait_for(self, future: Future[dict[str, Any]], timeout: float) -> dict[str, Any]:
        """What the process answers; ``{"error": …}`` where it does not."""
        try:
            return future.result(timeout)
        except TooLate:
            return {"error": f"no answer within {timeout:g} s"}
        except CancelledError:
            return {"error": self._last_words[-1] if self._last_words else "its process died"}

    def _read_results(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            future = self._waiting[message["id"]]
            if not future.done():
                future.set_result(message["result"])
        self._readers[1].join()
        with self._turn:
            self._over = True
            for future in self._waiting.values():
                future.cancel()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.strip():
                self._last_words = [*self._last_words[-20:], line.strip()]


class ProbeJob:
    """A job under way."""

    def __init__(self, prober: Prober, future: Future[dict[str, Any]], timeout: float) -> None:
        self._prober = prober
        self._future = future
        self._timeout = timeout

    def result(self) -> dict[str, Any]:
        """What came of it; ``{"error": …}`` where nothing did."""
        return self._prober.wait_for(self._future, self._timeout + _IMPORT_TIMEOUT_S + _SLACK_S)
