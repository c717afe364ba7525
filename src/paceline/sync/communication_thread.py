"""A thread that carries gradients while the backward goes on."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class _Errand(NamedTuple):
    run: Callable[[], Tensor]
    future: torch.futures.Future[Tensor]
    stream: torch.cuda.Stream | None


class CommunicationThread:
    """Does one errand after the other, in the order they were given, in a thread of its own.

    Every rank gives the same errands in the same order, so that the collectives in them match.
    Collectives begun in callbacks of earlier ones would not: those run in whatever order messages
    arrive. For the same reason its errands need a process group that no other thread uses.
    """

    def __init__(self) -> None:
        self._errands: queue.SimpleQueue[_Errand | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(
        self, errand: Callable[[], Tensor], stream: torch.cuda.Stream | None = None
    ) -> torch.futures.Future[Tensor]:
        """Have ``errand`` done; what it returns, or raises, comes as the future's.

        ``stream`` is where it leaves its result on a GPU.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="paceline-courier", daemon=True)
            self._thread.start()
        devices: list[int | str | torch.device] = [] if stream is None else [stream.device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        self._errands.put(_Errand(errand, future, stream))
        return future

    def close(self, seconds: float | None = None) -> None:
        """Wait for what is under way, so long at most, and end."""
        if self._thread is not None:
            self._errands.put(None)
            self._thread.join(seconds)
            self._thread = None

    def _work(self) -> None:
        while True:
            errand = self._errands.get()
            if errand is None:
                return
            _do(errand)
            del errand  # or else it would hold gradients while there is nothing to do


def _do(errand: _Errand) -> None:
    stream = errand.stream
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        try:
            errand.future.set_result(errand.run())
        except Exception as error:
            errand.future.set_exception(error)  # type: ignore[arg-type]  # torch's stub is wrong
