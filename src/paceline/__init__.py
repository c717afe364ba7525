"""Paceline: distributed training for PyTorch. Any layout, the same run.

``import paceline`` is cheap: each public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.checkpoint.checkpoints import Checkpoints as Checkpoints
    from paceline.data.make_loader import loader as loader
    from paceline.engine import Engine as Engine
    from paceline.engine import StepResult as StepResult
    from paceline.engine.accelerator import Accelerator as Accelerator
    from paceline.engine.parameter_groups import parameter_groups as parameter_groups
    from paceline.engine.prepare import prepare as prepare
    from paceline.launch.api import LaunchedRun as LaunchedRun
    from paceline.launch.api import launch as launch
    from paceline.layout import Layout as Layout
    from paceline.log_values import log as log
    from paceline.options import EMA as EMA
    from paceline.options import Checkpointing as Checkpointing
    from paceline.options import Compression as Compression
    from paceline.options import DataOptions as DataOptions
    from paceline.options import Evaluation as Evaluation
    from paceline.options import LocalSteps as LocalSteps
    from paceline.options import LossScaling as LossScaling
    from paceline.options import Pipelining as Pipelining
    from paceline.options import Recompute as Recompute
    from paceline.options import Reduction as Reduction
    from paceline.options import Sharding as Sharding
    from paceline.options import TensorParallel as TensorParallel
    from paceline.parallel.tensor import ColumnParallelLinear as ColumnParallelLinear
    from paceline.parallel.tensor import RowParallelLinear as RowParallelLinear
    from paceline.prove import verify as verify
    from paceline.trainer import Callback as Callback
    from paceline.trainer import EarlyStopping as EarlyStopping
    from paceline.trainer import History as History
    from paceline.trainer import Trainer as Trainer
    from paceline.trainer import WholeSet as WholeSet
    from paceline.trainer import load_weights as load_weights
    from paceline.trainer import save_adapter as save_adapter
    from paceline.world import World as World
    from paceline.world import collectives as collectives
    from paceline.world.rank_logger import get_logger as get_logger

_HOME = {
    "Accelerator": "paceline.engine.accelerator",
    "Callback": "paceline.trainer",
    "Checkpointing": "paceline.options",
    "Checkpoints": "paceline.checkpoint.checkpoints",
    "Compression": "paceline.options",
    "DataOptions": "paceline.options",
    "EarlyStopping": "paceline.trainer",
    "Engine": "paceline.engine",
    "Evaluation": "paceline.options",
    "History": "paceline.trainer",
    "LaunchedRun": "paceline.launch.api",
    "Layout": "paceline.layout",
    "EMA": "paceline.options",
    "LocalSteps": "paceline.options",
    "LossScaling": "paceline.options",
    "ColumnParallelLinear": "paceline.parallel.tensor",
    "Pipelining": "paceline.options",
    "Recompute": "paceline.options",
    "Reduction": "paceline.options",
    "RowParallelLinear": "paceline.parallel.tensor",
    "Sharding": "paceline.options",
    "TensorParallel": "paceline.options",
    "StepResult": "paceline.engine",
    "Trainer": "paceline.trainer",
    "WholeSet": "paceline.trainer",
    "World": "paceline.world",
    "collectives": "paceline.world",
    "get_logger": "paceline.world.rank_logger",
    "loader": "paceline.data",
    "load_weights": "paceline.trainer",
    "save_adapter": "paceline.trainer",
    "parameter_groups": "paceline.engine.parameter_groups",
    "log": "paceline.log_values",
    "prepare": "paceline.engine",
    "verify": "paceline.prove",
}
# Modules that are public under their own name.
_MODULES = (
    "checkpoint",
    "config",
    "data",
    "errors",
    "events",
    "launch",
    "models",
    "options",
    "schedules",
    "testing",
    "track",
)

__all__ = [*_HOME, "__version__", "errors", "events", "launch"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"paceline.{name}")
    else:
        if name.startswith("_"):  # asked for by Python itself, and often
            raise AttributeError(f"module 'paceline' has no attribute {name!r}")
        from paceline.options.habits.attributes import answer

        raise AttributeError(answer("paceline", name, [*__all__, *_MODULES]))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
