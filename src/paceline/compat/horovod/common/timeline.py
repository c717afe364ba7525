"""What the collectives of a job did when, as a file for Chrome's trace viewer (Perfetto).

Each tensor is a row. ``NEGOTIATE_…`` is the time from its submission on this rank until all ranks
have submitted it, the rest is the operation itself.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from typing import IO, Any

from paceline.compat.horovod.runtime.session import Session
from paceline.compat.horovod.runtime.settings import is_set

FILE = "HOROVOD_TIMELINE"
MARK_CYCLES = "HOROVOD_TIMELINE_MARK_CYCLES"
_LATER = "DYNAMIC"
"""The value of ``HOROVOD_TIMELINE`` of jobs that call ``start_timeline`` themselves."""


class Timeline:
    """Writes one file; called by the threads of the runtime."""

    def __init__(self, file: IO[str], *, mark_cycles: bool) -> None:
        self._file = file
        self._mark_cycles = mark_cycles
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._rows: dict[str, int] = {}
        self._open: dict[str, str] = {}
        self._is_first = True
        self._is_over = False
        self._write(
            {
                "name": "start_time",
                "ph": "M",
                "pid": 0,
                "args": {"start_time_since_epoch_in_micros": int(time.time() * 1e6)},
            }
        )

    def observe(self, name: str, kind: str, what: str) -> None:
        """Note that something happened to a tensor: it was submitted, started or finished."""
        operation = kind.upper()
        with self._lock:
            if self._is_over:
                return
            row = self._row(name)
            if what == "submitted":
                self._begin(row, name, f"NEGOTIATE_{operation}")
            elif what == "started":
                self._end(row, name)
                if self._mark_cycles:
                    self._write({"name": "CYCLE_START", "ph": "i", "s": "g", **self._at(0)})
                self._begin(row, name, operation)
            else:
                self._end(row, name)

    def close(self) -> None:
        """End the file; what comes later is not written."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                self._file.write("\n]\n")
                self._file.close()

    def _row(self, name: str) -> int:
        if name not in self._rows:
            self._rows[name] = len(self._rows) + 1
            row = {"ph": "M", "pid": self._rows[name]}
            self._write({"name": "process_name", **row, "args": {"name": name}})
            self._write({"name": "process_sort_index", **row, "args": {"sort_index": row["pid"]}})
        return self._rows[name]

    def _begin(self, row: int, name: str, phase: str) -> None:
        self._open[name] = phase
        self._write({"name": phase, "ph": "B", **self._at(row)})

    def _end(self, row: int, name: str) -> None:
        if (phase := self._open.pop(name, None)) is not None:  # it may be older than the file
            self._write({"name": phase, "ph": "E", **self._at(row)})

    def _at(self, row: int) -> dict[str, Any]:
        return {"ts": int((time.monotonic() - self._start) * 1e6), "pid": row}

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write("[\n" if self._is_first else ",\n")
        self._is_first = False
        self._file.write(json.dumps(event))


_current: Timeline | None = None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record collectives from now on. Rank 0 writes ``file_path``; one that runs is ended.

    ``mark_cycles`` marks each time at which the runtime begins an operation.
    """
    global _current
    session = Session.current()
    stop_timeline()
    if session.topology.rank != 0:
        return
    file = open(file_path, "w", encoding="utf-8")  # noqa: SIM115
    _current = Timeline(file, mark_cycles=mark_cycles)
    session.background.observer = _current.observe


def stop_timeline() -> None:
    """Stop recording, and close the file."""
    global _current
    timeline, _current = _current, None
    if timeline is None:
        return
    if Session.exists():
        Session.current().background.observer = None
    timeline.close()


def start_by_environment() -> None:
    """Record from the start where ``HOROVOD_TIMELINE`` names a file."""
    place = os.environ.get(FILE, "").strip()
    if place and place != _LATER:
        start_timeline(place, mark_cycles=is_set(MARK_CYCLES))


atexit.register(stop_timeline)
