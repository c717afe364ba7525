"""Readers of a run's events: the progress bar, TensorBoard, MLflow, and following from outside.

A tracker is anything with ``handle(event)`` and ``close()``.
"""

from paceline.track.follow import follow, following
from paceline.track.mlflow import MLflow
from paceline.track.progress import Progress
from paceline.track.tensorboard import TensorBoard
from paceline.track.tracker import Recorder, Tracker

__all__ = ["MLflow", "Progress", "Recorder", "TensorBoard", "Tracker", "follow", "following"]
