"""``deepspeed.utils``: what scripts take from there."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.compat.deepspeed.pipe import RepeatingLoader
from paceline.world import World

logger = logging.getLogger("paceline.compat.deepspeed")


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


def whole_parameter(tensor: Any) -> Tensor:
    """A parameter, or its gradient, whole, whatever part of it this rank holds. A collective."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach()


__all__ = [
    "RepeatingLoader",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "whole_parameter",
]
