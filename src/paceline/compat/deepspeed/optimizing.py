"""The optimizer and the scheduler of an engine: given, made by a function, or by the config."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.config.deepspeed.settings import DeepSpeedSettings
from paceline.errors import ConfigError, TrainingError


def make_optimizer(
    given: Any, model: nn.Module, parameters: Iterable[Any] | None, settings: DeepSpeedSettings
) -> Optimizer | None:
    """The optimizer that was given, or is made by a function, or that the config names."""
    held = [p for p in model.parameters() if p.requires_grad] if parameters is None else parameters
    held = list(held)
    if isinstance(given, Optimizer):
        return given
    if callable(given):
        made = given(held)
        if not isinstance(made, Optimizer):
            raise TrainingError(
                f"deepspeed.initialize: optimizer= made a {type(made).__name__}, not an optimizer "
                "of torch."
            )
        return made
    if given is not None:
        raise TrainingError(
            f"deepspeed.initialize: optimizer={type(given).__name__} must be an optimizer of "
            "torch, or a function from parameters to one."
        )
    if settings.optimizer is None:
        return None
    found: Optimizer = _imported(settings.optimizer.name)(held, **settings.optimizer.args)
    return found


def make_scheduler(given: Any, optimizer: Optimizer, settings: DeepSpeedSettings) -> Any:
    """The scheduler that was given, or is made by a function, or that the config names."""
    if given is not None:
        return given(optimizer) if callable(given) and not hasattr(given, "step") else given
    if settings.schedule is None:
        return None
    return _imported(settings.schedule.name)(optimizer, **settings.schedule.args)


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(
            f"DeepSpeed config: {name} is of the package {module}, which is not installed: {error}."
        ) from None
