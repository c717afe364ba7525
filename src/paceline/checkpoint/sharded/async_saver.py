"""Saving beside the training: the step waits for a copy in memory, a thread does the rest."""

from __future__ import annotations

import atexit
import copy
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from paceline.checkpoint.folder import Folder
from paceline.checkpoint.rank_state import RankState
from paceline.checkpoint.retention import Keep
from paceline.checkpoint.sharded.host_copy import HostCopy
from paceline.checkpoint.sharded.save_load import save_measured
from paceline.checkpoint.sharded.write_share import OwnBoxes
from paceline.errors import CheckpointError

_AT_EXIT_S = 10.0
"""How long a process that ends without ``AsyncSaver.close`` waits for the save in flight: a
thread that comes back from a collective while Python shuts down would abort the process."""


@dataclass(frozen=True)
class SaveOutcome:
    """What became of a save. It succeeded if and only if ``error`` is ``None``.

    ``bytes`` is what all ranks wrote, ``seconds`` how long it took from the copy on, ``stalled``
    how long the training stood still: for the save before this one to end, and for the copy.
    ``warning``: saved, but older checkpoints could not be deleted.
    """

    step: int
    path: str
    bytes: int
    seconds: float
    stalled: float
    error: str | None = None
    warning: str | None = None


class AsyncSaver:
    """Saves checkpoints into ``folder``, one at a time, while the training goes on.

    One on each rank of ``group``, which must be a group of their own that moves CPU tensors (Gloo)
    and that nothing else uses; ``None`` in a run of one process. Its timeout is how long a rank
    waits for the slowest one's disk. After each save the first rank deletes what ``keep`` does not
    want; ``None`` keeps everything.
    """

    def __init__(self, folder: Folder, group: dist.ProcessGroup | None, keep: Keep | None) -> None:
        self._folder = folder
        self._group = group
        self._keep = keep
        self._own = OwnBoxes(group)
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._outcomes: list[SaveOutcome] = []
        self._lock = threading.Lock()
        self._closed = False

    def reserve(self, state: RankState) -> None:
        """Get the memory for the copies now, so that the first save is as fast as any other.

        Called by all ranks, with states as they will save them.
        """
        self._join()
        self._copy.reserve(self._own.of(0, state))

    def save(self, step: int, state: RankState, info: dict[str, Any]) -> float:
        """Begin to save; the seconds waited for the save before this one to end.

        Called by all ranks, in the same order. When it returns, ``state`` may change. What becomes
        of it is reported by ``finished``: it never raises because a save failed, nor because
        this rank's copy did.
        """
        if self._closed:
            raise CheckpointError(f"step {step} cannot be saved: the saver is closed.")
        began = time.perf_counter()
        self._join()
        copying = time.perf_counter()
        waited = copying - began
        problem = None
        try:
            own = self._own.of(step, state)  # nothing else uses the group now
            state, info = self._copy.take(own), copy.deepcopy(info)
        except Exception as error:  # reported to all ranks: they would wait for this one in vain
            known = isinstance(error, CheckpointError)
            problem = str(error) if known else f"{type(error).__name__}: {error}"
            state, info = RankState(), {}
        stalled = time.perf_counter() - began
        self._thread = threading.Thread(
            target=self._run,
            args=(step, state, info, copying, stalled, problem),
            name=f"save of step {step}",
            daemon=True,  # a disk that hangs must not keep the process from ending
        )
        self._thread.start()
        atexit.register(self._thread.join, _AT_EXIT_S)
        return waited

    def finished(self) -> list[SaveOutcome]:
        """The saves that ended since the last call, oldest first. Does not wait."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self) -> list[SaveOutcome]:
        """Wait for the save in flight; then as ``finished``."""
        self._join()
        return self.finished()

    def close(self) -> list[SaveOutcome]:
        """Wait for the save in flight and give the memory back; then as ``finished``."""
        self._closed = True
        self._join()
        self._copy.free()
        return self.finished()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self._thread.join)
            self._thread = None

    def _run(
        self,
        step: int,
        state: RankState,
        info: dict[str, Any],
        began: float,
        stalled: float,
        problem: str | None,
    ) -> None:
        size, error, warning = 0, None, None
        try:
            _, size = save_measured(
                self._folder, step, state, info=info, group=self._group, problem=problem
            )
        except CheckpointError as failure:
            error = str(failure)
        except BaseException as failure:
            error = f"saving step {step} failed: {type(failure).__name__}: {failure}"
        else:
            warning = self._delete_old(step)
        path = self._folder.get(step).path
        seconds = time.perf_counter() - began
        with self._lock:
            self._outcomes.append(SaveOutcome(step, path, size, seconds, stalled, error, warning))

    def _delete_old(self, step: int) -> str | None:
        if self._keep is None or (self._group is not None and dist.get_rank(self._group) != 0):
            return None
        try:
            self._folder.prune(self._keep, newest=step)
        except Exception as failure:
            return f"step {step} is saved, but older checkpoints could not be deleted: {failure}"
        return None
