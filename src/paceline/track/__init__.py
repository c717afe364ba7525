"""Readers of a run's events: the progress bar, recorders of its numbers, following from outside.

A tracker is anything with ``handle(event)`` and ``close()``. To record numbers elsewhere, derive
from ``RunRecorder``: ``begin``, ``log`` and ``end``.
"""

from paceline.track.comet import Comet
from paceline.track.csv_file import CSV
from paceline.track.follow import follow, following
from paceline.track.mlflow import MLflow
from paceline.track.progress import Progress
from paceline.track.run_recorder import RunRecorder
from paceline.track.tensorboard import TensorBoard
from paceline.track.tracker import Recorder, Tracker
from paceline.track.wandb import WandB

__all__ = [
    "CSV",
    "Comet",
    "MLflow",
    "Progress",
    "Recorder",
    "RunRecorder",
    "TensorBoard",
    "Tracker",
    "WandB",
    "follow",
    "following",
]
