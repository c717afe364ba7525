"""``deepspeed.utils``: what scripts take from there."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.checkpoint.weights.deepspeed_zero import read_zero_checkpoint
from paceline.compat.deepspeed.pipe import RepeatingLoader
from paceline.world import World

logger = logging.getLogger("paceline.compat.deepspeed")
if not logger.handlers:
    # Shown without a logging.basicConfig of the script's, as scripts for DeepSpeed expect.
    _shown = logging.StreamHandler(sys.stdout)
    _shown.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
    logger.addHandler(_shown)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks: by default, or with -1 among them, on all."""
    rank, wanted = World.current().rank, list(ranks or [-1])
    if rank in wanted or -1 in wanted:
        logger.log(level, "[rank %d] %s", rank, message)


def safe_get_full_fp32_param(param: Tensor) -> Tensor:
    """The whole parameter in float32. A collective."""
    return whole_parameter(param).float()


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The whole gradient, averaged over the ranks, before ``step``. A collective."""
    return None if param.grad is None else whole_parameter(param.grad)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> dict[str, Tensor]:
    """The weights of a checkpoint that DeepSpeed wrote with ZeRO; executes no code from it."""
    return read_zero_checkpoint(checkpoint_dir, tag)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Give ``model`` those weights."""
    model.load_state_dict(read_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def whole_parameter(tensor: Any) -> Tensor:
    """A parameter, or its gradient, whole, whatever part of it this rank holds. A collective."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach()


__all__ = [
    "RepeatingLoader",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "whole_parameter",
]
