"""When a run ends before its last step: signals, callbacks, and all ranks agreeing on it."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from paceline.world import World

GO_ON, STOP, INTERRUPT = 0, 1, 2


class Interrupted(Exception):
    """All ranks have agreed to leave: a signal came during a pass that can be left halfway."""


class StopRequests:
    """Collects what this rank was asked, and lets the ranks agree on the strongest request.

    While active it takes SIGINT and SIGTERM: the first asks for an orderly end, the second is
    handled as it would have been without us.
    """

    signals = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, world: World) -> None:
        self._world = world
        self._own = GO_ON
        self._before: dict[signal.Signals, Any] = {}
        self.signal: int | None = None
        self.reason = ""

    def ask(self, request: int, reason: str = "") -> None:
        """Ask, from this rank, that the run ends after the current step."""
        self._own = max(self._own, request)
        self.reason = reason or self.reason

    def agree(self) -> int:
        """The strongest request of any rank. A collective: every rank calls it."""
        if self._world.size == 1:
            return self._own
        request = torch.tensor(self._own)
        dist.all_reduce(request, dist.ReduceOp.MAX, group=self._world.everyone.cpu_group)
        return int(request)

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():  # Python's rule for handlers
            self._before = {s: signal.signal(s, self._handle) for s in self.signals}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._put_back()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self.ask(INTERRUPT)
        self._put_back()

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}
