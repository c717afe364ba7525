"""The signals that a launcher gets: which ask for an end, which for a checkpoint."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

# Wrappers (uv, make, timeout) pass on a Ctrl-C that the terminal has already sent to everyone: a
# repetition this soon is an echo, not an impatient user.
_ECHO_SECONDS = 0.5


class LauncherSignals:
    """Notes the signals that ask for an end, where they can be caught: in the main thread.

    SIGUSR1 asks for a checkpoint.
    """

    def __init__(self) -> None:
        self._save_asked = False
        self.first: signal.Signals | None = None
        self.insisted = False
        self._first_at = 0.0
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> LauncherSignals:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # Ignored (nohup, a background job) stays ignored; None is a handler of C code.
                if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                    self._earlier[signum] = signal.signal(signum, self._note)
            self._earlier[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._note_save)
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._earlier.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = signal.Signals(signum)
            self._first_at = time.monotonic()
        elif time.monotonic() - self._first_at > _ECHO_SECONDS:
            self.insisted = True

    def _note_save(self, signum: int, frame: FrameType | None) -> None:
        self._save_asked = True

    def take_save(self) -> bool:
        """Whether a checkpoint was asked for since the last call."""
        asked, self._save_asked = self._save_asked, False
        return asked

    def as_error(self) -> BaseException:
        """What a launch that was asked to end raises."""
        assert self.first is not None
        interrupted = self.first is signal.SIGINT
        return KeyboardInterrupt() if interrupted else SystemExit(128 + self.first)

    def note_end_of_program(self) -> None:
        """In a thread: when the program's main thread is gone, the ranks are to end as well."""
        if self.first is None and not threading.main_thread().is_alive():
            self.first = signal.SIGTERM


def stopping(first: signal.Signals, grace: float) -> str:
    """What a launcher says when it is asked to end."""
    return (
        f"stopping ({first.name}): the ranks have {grace:g} s to save and leave; a second signal "
        "kills them at once."
    )


def passed_on(signum: signal.Signals) -> signal.Signals:
    """What ranks get to see: they know Ctrl-C and SIGTERM, a hang-up is the latter to them."""
    return signal.SIGTERM if signum is signal.SIGHUP else signum
