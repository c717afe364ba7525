"""What a run is asked while it trains, by signals and callbacks, and all ranks agreeing on it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from types import FrameType, TracebackType
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.launch.exit_codes import PEER_LEAVES, TOLD_TO_LEAVE
from paceline.launch.launchers import LAUNCHER_PID
from paceline.sync.deferred_numbers import LAG
from paceline.world import World

GO_ON, STOP, LEAVE, INTERRUPT = 0, 1, 2, 3
"""What ranks can be asked, from the weakest to the strongest: to end the run early; to save and
leave, because machines are taken away or the world forms anew (SIGTERM); the same because a person
ends the run (Ctrl-C)."""


class Interrupted(Exception):
    """All ranks have agreed to leave: a signal came during a pass that can be left halfway."""


class Agreed(NamedTuple):
    """What the ranks agreed on after a step."""

    request: int
    """The strongest request of any rank: go on, stop, leave, interrupt."""
    save: bool
    """Some rank asks for a checkpoint now."""
    busy: bool
    """Some rank is still writing one."""


class StopRequests:
    """Collects what this rank was asked, and lets the ranks agree on the strongest request.

    While active it takes SIGINT and SIGTERM: the first asks for an orderly end, the second is
    handled as it would have been without us. But for a further SIGTERM to a rank of our launcher:
    schedulers send it to every process of a job, and the launcher passes it on. It kills ranks by
    SIGKILL. SIGUSR1 asks for a checkpoint, as often as it comes.
    """

    signals = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, world: World) -> None:
        self._world = world
        self._own = GO_ON
        self._save_asked = False
        self._before: dict[signal.Signals, Any] = {}
        self._save_before: Any = None
        self.signal: int | None = None
        self.agreed = GO_ON
        """What the ranks agreed on last."""
        self.reason = ""
        self._signalled: float | None = None
        self._begun: deque[tuple[Tensor, dist.Work | None]] = deque()

    def ask(self, request: int, reason: str = "") -> None:
        """Ask, from this rank, that the run ends after the current step."""
        self._own = max(self._own, request)
        self.reason = reason or self.reason

    def agree(self) -> int:
        """The strongest request of any rank. A collective: every rank calls it."""
        [self.agreed] = self._strongest([self._own])
        return self.agreed

    def agree_after_step(
        self, *, save: bool = False, busy: bool = False, later: bool = False
    ) -> Agreed:
        """The same, and what else the ranks must do together. A collective.

        With ``later`` no rank waits for another: they act on what was asked some steps ago, all at
        the same step.
        """
        asked, self._save_asked = self._save_asked, False
        self._begun.append(self._begin([self._own, save or asked, busy]))
        ended: list[list[int]] = []
        while len(self._begun) > (LAG if later else 0):
            ended.append(self._ended(*self._begun.popleft()))
        if not ended:
            return Agreed(GO_ON, save=False, busy=True)
        self.agreed = max(request for request, _, _ in ended)
        save_now = any(save_asked for _, save_asked, _ in ended)
        return Agreed(self.agreed, save_now, busy=bool(ended[-1][2]))

    def most_seconds(self, own: float) -> tuple[float, float]:
        """The longest of all ranks' ``own``, and since the first signal. A collective."""
        since = 0.0 if self._signalled is None else time.monotonic() - self._signalled
        milliseconds = self._strongest([int(1000 * own), int(1000 * since)])
        return milliseconds[0] / 1000, milliseconds[1] / 1000

    def leave(self, message: str) -> NoReturn:
        """End this rank after the state has been saved, as the ranks agreed to.

        After a Ctrl-C as a Ctrl-C does. After SIGTERM with a code that tells a launcher whose
        machine has to leave: this one's, or another's.
        """
        if self.agreed == INTERRUPT:
            raise KeyboardInterrupt(message)
        raise SystemExit(TOLD_TO_LEAVE if self.signal == signal.SIGTERM else PEER_LEAVES)

    def _strongest(self, values: list[int]) -> list[int]:
        return self._ended(*self._begin(values))

    def _begin(self, values: list[int]) -> tuple[Tensor, dist.Work | None]:
        shared = torch.tensor([int(value) for value in values])
        if self._world.size == 1:
            return shared, None
        group = self._world.everyone.cpu_group
        return shared, dist.all_reduce(shared, dist.ReduceOp.MAX, group=group, async_op=True)

    def _ended(self, shared: Tensor, work: dist.Work | None) -> list[int]:
        if work is not None:
            with self._world.pulse.during("waiting"):
                work.wait()
        return [int(value) for value in shared.tolist()]

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():  # Python's rule for handlers
            self._before = {s: signal.signal(s, self._handle) for s in self.signals}
            self._save_before = signal.signal(signal.SIGUSR1, self._ask_save)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._put_back()
        if self._save_before is not None:
            signal.signal(signal.SIGUSR1, self._save_before)
            self._save_before = None
        while self._begun and kind is None:  # all ranks began them: none is left under way
            self._ended(*self._begun.popleft())

    def _ask_save(self, number: int, frame: FrameType | None) -> None:
        self._save_asked = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._signalled = time.monotonic()
        self.ask(LEAVE if number == signal.SIGTERM else INTERRUPT)
        ours = number == signal.SIGTERM and LAUNCHER_PID in os.environ
        echoed = {signal.SIGTERM: self._before.pop(signal.SIGTERM)} if ours else {}
        self._put_back()
        self._before = echoed
        if echoed:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}
