"""Errors in background threads, reported without ending the thread.

Threads that others rely on must not end because of one odd message or one failing callback. Each
turn of such a thread runs under ``BackgroundErrors.reported``: what it raises is reported, at
most once a minute for each kind, and the thread goes on.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

REPORT_SECONDS = 60.0
"""Each kind of error is reported at most once in this time."""
_KINDS = 100  # kept apart; an attacker who makes up new ones must not fill the memory


def to_stderr(message: str) -> None:
    """Report on the console, or in the log of a rank."""
    print(f"paceline: {message}", file=sys.stderr, flush=True)


class BackgroundErrors:
    """Reports what goes wrong in one thread, and keeps the thread going.

    ``who`` is what the thread does, in words. ``show`` gets each report; it may fail as well.
    """

    def __init__(self, who: str, show: Callable[[str], None] = to_stderr) -> None:
        self._who, self._show = who, show
        self._lock = threading.Lock()
        self._reported: dict[str, float] = {}
        self._unreported: dict[str, int] = {}

    @contextlib.contextmanager
    def reported(
        self, doing: str = "", *, but: tuple[type[BaseException], ...] = ()
    ) -> Iterator[None]:
        """Report what the block raises, and go on; exceptions of ``but`` are passed on."""
        try:
            yield
        except but:
            raise
        except Exception as error:
            self.report(error, doing)

    def report(self, error: BaseException, doing: str = "") -> None:
        """Report an exception, unless one of its kind was reported a moment ago."""
        kind = f"{doing}: {type(error).__name__}"
        now = time.monotonic()
        with self._lock:
            if len(self._reported) >= _KINDS and kind not in self._reported:
                kind = "many kinds"
            if now - self._reported.get(kind, -REPORT_SECONDS) < REPORT_SECONDS:
                self._unreported[kind] = self._unreported.get(kind, 0) + 1
                return
            self._reported[kind] = now
            more = self._unreported.pop(kind, 0)
        what = f"{doing}: " if doing else ""
        again = f" (and {more} more like it)" if more else ""
        text = f"{what}{type(error).__name__}: {_printable(error)}{again}; {self._who} goes on"
        with contextlib.suppress(Exception):
            self._show(text)


def _printable(error: BaseException) -> str:
    """The first line of what an error says, without what a terminal would act upon."""
    lines = str(error).strip().splitlines() or [""]
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in lines[0])[:300]
