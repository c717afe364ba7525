"""Where a rank's output goes: both streams to one log, and a log that is full costs only itself."""

from __future__ import annotations

import io
import os
import sys

from paceline.launch import notices


class ForgivingFile(io.FileIO):
    """Standard output, or error, on a log: what the disk refuses is dropped and counted.

    A program whose ``print`` raises because the disk is full would end for no reason of its own.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._lost = 0
        self._why = ""

    def write(self, data: object) -> int:
        """Write all of it, or drop it."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        size = len(view)
        try:
            if self._lost:
                self._write_all(
                    memoryview(f"\n[{self._lost} bytes of output are lost: {self._why}]\n".encode())
                )
                self._lost = 0
            self._write_all(view)
        except OSError as error:
            if not self._lost:
                self._why = error.strerror or str(error)
                notices.send(
                    f"rank {os.environ.get('RANK', '?')}: its output cannot be written to its log "
                    f"({self._why}) and is dropped until that is put right."
                )
            self._lost += size
        return size

    def _write_all(self, view: memoryview) -> None:
        while view:
            written = super().write(view)
            view = view[written:]


def one_log_for_both_streams(log: str) -> None:
    """Send this process's output to ``log``, as it is written."""
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    except OSError as error:
        notices.send(f"{log} cannot be opened ({error.strerror}): the output of its rank is lost.")
        descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = sys.__stdout__ = _text(1, sys.stdout, "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2, sys.stderr, "backslashreplace")  # type: ignore[misc]


def _text(descriptor: int, before: object, errors: str) -> io.TextIOWrapper:
    encoding = getattr(before, "encoding", None) or "utf-8"
    return io.TextIOWrapper(
        ForgivingFile(descriptor),
        encoding=encoding,
        errors=getattr(before, "errors", None) or errors,
        write_through=True,
    )
