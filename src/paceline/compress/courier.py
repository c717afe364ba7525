"""A thread that carries gradients while the backward goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch
from torch import Tensor


class Courier:
    """Does one errand after the other, in the order they were given, in a thread of its own.

    Every rank gives the same errands in the same order, so that the collectives in them match.
    Collectives begun in callbacks of earlier ones would not: those run in whatever order messages
    arrive.
    """

    def __init__(self) -> None:
        self._errands: queue.SimpleQueue[
            tuple[Callable[[], Tensor], torch.futures.Future[Tensor]] | None
        ] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, errand: Callable[[], Tensor]) -> torch.futures.Future[Tensor]:
        """Have ``errand`` done; what it returns, or raises, comes as the future's."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="paceline-courier", daemon=True)
            self._thread.start()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._errands.put((errand, future))
        return future

    def close(self) -> None:
        """Wait for what is under way and end."""
        if self._thread is not None:
            self._errands.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (given := self._errands.get()) is not None:
            errand, future = given
            try:
                future.set_result(errand())
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]  # torch's stub is wrong
