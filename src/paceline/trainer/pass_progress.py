"""How far a pass over data is, as events: the progress bar and ``paceline diagnose`` read them."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.data import Loader
from paceline.events import Event, PhaseProgress

_EVERY_SECONDS = 1.0


class PassProgress:
    """Reports the beginning of a pass, and then its progress about once a second."""

    def __init__(
        self,
        emit: Callable[[Event], None],
        phase: str,
        step: int,
        loader: Loader,
        batches: int | None = None,
    ) -> None:
        self._emit, self._phase, self._step = emit, phase, step
        self._loader = loader
        known = [n for n in (batches, loader.steps_per_epoch) if n is not None]
        self._total = min(known, default=None)
        self._done = self.samples = 0
        self._told = 0.0

    def begin(self) -> None:
        """The pass begins, or another one over the same data."""
        self._done = self.samples = 0
        self._tell()

    def end(self) -> None:
        """The pass is through."""
        self._tell()

    def batch_done(self) -> None:
        """One more batch is through."""
        self._done += 1
        self.samples += self._loader.share.global_samples
        if time.monotonic() - self._told >= _EVERY_SECONDS:
            self._tell()

    def _tell(self) -> None:
        self._told = time.monotonic()
        self._emit(
            PhaseProgress(
                phase=self._phase,
                step=self._step,
                done=self._done,
                total=self._total,
                samples=self.samples,
            )
        )
