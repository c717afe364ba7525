"""``Trainer.fit(nproc=N)``: a plain script or a notebook brings up its own ranks."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.diagnose.hangs.oversee import HangOverseer, to_stderr
from paceline.events import FILE_NAME
from paceline.launch import local
from paceline.launch.restart_policy import RestartLimits
from paceline.track import Progress, following
from paceline.trainer.arguments import Resume
from paceline.trainer.base import TrainerBase
from paceline.trainer.handover import find, leave_share, leave_whole, take
from paceline.trainer.history import History, where_stopped

FitHere = Callable[[Any, Any, Any, int | None, int | None, Any], History]
"""``fit`` on one rank: the trainer, both datasets, epochs, steps, and ``resume``."""


def fit_on_new_ranks(
    trainer: TrainerBase,
    fit_here: FitHere,
    train: Any,
    val: Any,
    *,
    epochs: int | None,
    steps: int | None,
    nproc: int,
    resume: Resume,
    limits: RestartLimits,
) -> History:
    """Train on ``nproc`` new ranks; what the caller has ends up as theirs, however they end."""
    trackers = [*trainer.trackers, *([Progress()] if trainer.progress else [])]
    with tempfile.TemporaryDirectory(prefix="paceline-events-") as temporary:
        # The ranks write events; the trackers read them here, where the terminal is.
        rank_trainer = trainer.for_ranks(events_are_shown=bool(trackers))
        events_dir = trainer.run_dir or Path(temporary)
        left_dir = Path(temporary) / "left"
        left_dir.mkdir()

        def on_each_rank() -> History:
            rank_trainer.events_dir = events_dir
            # A torch scheduler marks its optimizer, and the mark is lost on the way here.
            warnings.filterwarnings("ignore", "Seems like `optimizer.step")
            try:
                return fit_here(rank_trainer, train, val, epochs, steps, resume)
            finally:
                leave = leave_whole if rank_trainer.left_in_order else leave_share
                leave(left_dir, rank_trainer, train)

        with following(events_dir, trackers):
            try:
                history: History = local.call(
                    on_each_rank,
                    nproc=nproc,
                    log_dir=None if trainer.run_dir is None else trainer.run_dir / "logs",
                    events_dir=events_dir,
                    limits=limits,
                    standby=limits.max_restarts > 0,
                    hang_watcher=lambda: HangOverseer(
                        action="restart",
                        events_dir=events_dir,
                        say=None if trackers else to_stderr,
                    ),
                )
            except KeyboardInterrupt:
                begun = (events_dir / FILE_NAME).exists()
                so_far = History.read(events_dir) if begun else History()
                raise KeyboardInterrupt(where_stopped(so_far, trainer.run_dir)) from None
            finally:
                # However the ranks ended: what they had learned is the caller's.
                if (left := find(left_dir)) is not None:
                    take(trainer, left, train)
    return history
