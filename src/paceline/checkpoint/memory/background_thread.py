"""A thread beside the training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from paceline.launch.background_errors import BackgroundErrors


class BackgroundThread:
    """A thread that does one thing at a time; starting one each time would cost the step."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None

    def begin(self, job: Callable[[], None]) -> None:
        """Have it do ``job``, once ``wait`` has returned for the one before."""
        if self._thread is None:
            name = "paceline-snapshot"
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()
        self._idle.clear()
        self._jobs.put(job)

    def wait(self) -> None:
        """Return when it has nothing to do."""
        self._idle.wait()

    def end(self) -> None:
        """Let it finish, and be gone."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        errors = BackgroundErrors("the thread that keeps snapshots")  # the next one waits for it
        while (job := self._jobs.get()) is not None:
            try:
                with errors.reported("a snapshot was not kept"):
                    job()
            finally:
                self._idle.set()
