"""``Trainer.fit(nproc=N)``: a plain script or a notebook brings up its own ranks."""

from __future__ import annotations

import copy
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from paceline.diagnose.hangs.oversee import HangOverseer, to_stderr
from paceline.events import FILE_NAME
from paceline.launch import local
from paceline.launch.policy import Limits
from paceline.track import Progress, following
from paceline.trainer.history import History, where_stopped

if TYPE_CHECKING:
    from paceline.trainer.trainer import Trainer


def fit(
    trainer: Trainer,
    train: Any,
    val: Any,
    *,
    epochs: int | None,
    steps: int | None,
    nproc: int,
    resume: bool,
    limits: Limits,
) -> History:
    """Train on ``nproc`` new ranks; the caller's model and optimizer end up as theirs."""
    trackers = [*trainer.trackers, *([Progress()] if trainer.progress else [])]
    with tempfile.TemporaryDirectory(prefix="paceline-events-") as temporary:
        # The ranks write events; the trackers read them here, where the terminal is.
        rank_trainer = copy.copy(trainer)
        rank_trainer.trackers, rank_trainer.progress = [], False
        rank_trainer.events_are_shown = bool(trackers)
        events_dir = trainer.run_dir or Path(temporary)

        def on_each_rank() -> tuple[History, dict[str, Any], dict[str, Any]]:
            rank_trainer.events_dir = events_dir
            # A torch scheduler marks its optimizer, and the mark is lost on the way here.
            warnings.filterwarnings("ignore", "Seems like `optimizer.step")
            history = rank_trainer._fit(train, val, epochs, steps, resume)
            engine = rank_trainer.engine
            state = engine.state_dict()  # the whole model's, whatever the layout
            return history, {k: v.cpu() for k, v in state["model"].items()}, state["optimizer"]

        with following(events_dir, trackers):
            try:
                history, model, optimizer = local.call(
                    on_each_rank,
                    nproc=nproc,
                    log_dir=None if trainer.run_dir is None else trainer.run_dir / "logs",
                    events_dir=events_dir,
                    limits=limits,
                    standby=limits.max_restarts > 0,
                    overseer=lambda: HangOverseer(
                        action="restart",
                        events_dir=events_dir,
                        say=None if trackers else to_stderr,
                    ),
                )
            except KeyboardInterrupt:
                begun = (events_dir / FILE_NAME).exists()
                so_far = History.read(events_dir) if begun else History()
                raise KeyboardInterrupt(where_stopped(so_far, trainer.run_dir)) from None
    trainer.model.load_state_dict(model)
    if isinstance(trainer.optimizer, Optimizer):
        trainer.optimizer.load_state_dict(optimizer)
    return history
