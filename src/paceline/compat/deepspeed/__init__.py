"""DeepSpeed's interface on Paceline: ``import paceline.compat.deepspeed as deepspeed``.

``initialize`` reads a DeepSpeed config and gives an engine with ``backward`` and ``step``. What is
not there is answered with what to use instead. See docs/guides/deepspeed.md.
"""

from __future__ import annotations

from typing import Any

from paceline.compat.deepspeed import checkpointing, comm, ops, pipe, runtime, utils, zero
from paceline.compat.deepspeed.accelerator import get_accelerator
from paceline.compat.deepspeed.engine import DeepSpeedEngine
from paceline.compat.deepspeed.initialize import initialize
from paceline.compat.deepspeed.launching import add_config_arguments, init_distributed
from paceline.compat.deepspeed.pipe import PipelineEngine, PipelineModule
from paceline.compat.deepspeed.utils import log_dist, logger

__version__ = "0.19.8"
"""The version whose interface this is, for scripts that ask."""
dist = comm

_INSTEAD = {
    "init_inference": "There are no kernels for inference. Use paceline.Engine(...).predict, or "
    "export the model for a server: paceline checkpoint export.",
    "InferenceEngine": "Use paceline.Engine(...).predict.",
    "default_inference_config": "There are no kernels for inference.",
    "moe": "Experts are not spread over ranks. Write the layer in torch; zero=3 shards it.",
    "OnDevice": "Use torch.device('meta') as a context, and paceline.Engine(init=...).",
    "DeepSpeedConfig": "Use paceline.config.deepspeed.settings.read_settings.",
    "DeepSpeedHybridEngine": "There are no kernels for generation. Use the model as it is.",
    "DeepSpeedTransformerLayer": "Use torch.nn.TransformerEncoderLayer.",
    "tp_model_init": "Use paceline.Engine(..., layout='tp=2').",
    "launcher": "Start scripts with: paceline train --script FILE --nproc N.",
}


def __getattr__(name: str) -> Any:
    hint = _INSTEAD.get(name, "What there is of DeepSpeed is in docs/guides/deepspeed.md.")
    raise AttributeError(f"paceline.compat.deepspeed has no {name!r}. {hint}")


__all__ = [
    "DeepSpeedEngine",
    "PipelineEngine",
    "PipelineModule",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "dist",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "ops",
    "pipe",
    "runtime",
    "utils",
    "zero",
]
