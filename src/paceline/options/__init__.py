"""Every option of Paceline, declared once: type, default, bounds and a sentence. Imports no torch.

The config's schema, the checks of ``Engine`` and ``Trainer`` and the tables of the documentation
are made from these classes. To add an option, add a field here, use it, and give it its line in the
signature of ``Engine`` or ``Trainer`` and in the config's schema: tests say where one is missing.
"""

from paceline.options.checkpointing import Checkpointing
from paceline.options.compression import Compression, Form
from paceline.options.data import DataOptions
from paceline.options.ema import EMA
from paceline.options.engine import EngineOptions
from paceline.options.local_steps import LocalSteps
from paceline.options.loss_scaling import LossScaling
from paceline.options.pipeline import Pipelining
from paceline.options.recompute import Recompute
from paceline.options.reduction import Reduction
from paceline.options.reference import reference
from paceline.options.sharding import Sharding
from paceline.options.tensor import TensorParallel
from paceline.options.trainer import Evaluation, TrainerOptions

__all__ = [
    "EMA",
    "Checkpointing",
    "Compression",
    "DataOptions",
    "EngineOptions",
    "Evaluation",
    "Form",
    "LocalSteps",
    "LossScaling",
    "Pipelining",
    "Recompute",
    "Reduction",
    "Sharding",
    "TensorParallel",
    "TrainerOptions",
    "reference",
]
