"""The trainer: fit, evaluate, callbacks, stopping, resume."""

from paceline.checkpoint.checkpoints import Checkpoints
from paceline.options import Checkpointing, DataOptions, Evaluation
from paceline.trainer.adapter import save_adapter
from paceline.trainer.callbacks import Callback, EarlyStopping
from paceline.trainer.evaluate import WholeSet
from paceline.trainer.history import History
from paceline.trainer.trainer import Trainer
from paceline.trainer.weights import load_weights

__all__ = [
    "Callback",
    "Checkpointing",
    "Checkpoints",
    "DataOptions",
    "EarlyStopping",
    "Evaluation",
    "History",
    "Trainer",
    "WholeSet",
    "load_weights",
    "save_adapter",
]
