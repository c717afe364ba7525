"""A launcher's request that ranks leave, because a machine goes or comes: SIGTERM."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

from paceline.launch import exit_codes

LEAVE = 4
"""The update that asks ranks to leave; Horovod's own are 1 and 2, hosts removed and added."""


class LeaveRequests:
    """During the block, SIGTERM is passed to ``notify`` instead of ending the process.

    A script that handles SIGTERM itself keeps its handler; so does a thread other than the main
    one, which can have none.
    """

    def __init__(self, notify: Callable[[float, int], None]) -> None:
        self._notify = notify
        self._listens = False
        self.came = False
        """Whether this process was asked."""

    def __enter__(self) -> LeaveRequests:
        """Begin to listen."""
        self.listen()
        return self

    def listen(self) -> None:
        """Take SIGTERM for a request, where the script has no handler of its own."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._take)
            self._listens = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop_listening()

    def stop_listening(self) -> None:
        """From now on SIGTERM ends the process, as if this had never been."""
        if self._listens:
            self._listens = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def leave(self) -> NoReturn:
        """End this process in the way in which a launcher knows that it is to be started again."""
        raise SystemExit(exit_codes.TOLD_TO_LEAVE if self.came else exit_codes.PEER_LEAVES)

    def _take(self, signum: int, frame: FrameType | None) -> None:
        self.came = True
        self._notify(time.time(), LEAVE)
