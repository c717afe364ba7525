"""What may be passed to ``Engine``, ``Trainer``, ``prepare`` and ``verify``, by kind.

A wrong kind is answered here, in one sentence, before anything is built: not by an error from
somewhere inside a step. Options check themselves (``paceline.options``); what values mean together
is checked by ``checks.py`` and the rules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import LossError, TrainingError
from paceline.options.declare import shown
from paceline.schedules import SteppedSchedule
from paceline.world import World

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
LRSchedule = Callable[[int], float] | LRScheduler | SteppedSchedule


def check_arguments(
    model: Any, loss: Any, optimizer: Any, world: Any = None, *, may_only_predict: bool = False
) -> None:
    """Refuse arguments that are not of the kind that ``Engine`` takes.

    ``may_only_predict``: without an optimizer nothing is trained, and none is missing.
    """
    check_model(model)
    check_loss(loss)
    if optimizer is not None or not may_only_predict:
        check_optimizer_kind(optimizer)
    if world is not None and not isinstance(world, World):
        raise TrainingError(
            f"world={shown(world)} must be a paceline.World. Leave it out for the world that this "
            "process was launched into."
        )


def check_model(model: Any) -> None:
    """Refuse what is no module, or a container that cannot be called."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        name = model.__name__
        raise TrainingError(f"model={name} is a class. Pass a model made from it: {name}(…).")
    if not isinstance(model, nn.Module):
        raise TrainingError(
            f"model={shown(model)} must be a torch.nn.Module. Build the model first and pass it."
        )
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        raise TrainingError(
            f"the model is a {type(model).__name__}, which has no forward(). Wrap it in a module "
            "that says how its parts are called, such as torch.nn.Sequential."
        )


def check_loss(loss: Any) -> None:
    """Refuse a loss that cannot be called, and a class instead of an object of it."""
    if isinstance(loss, type):
        name = loss.__name__
        raise LossError(f"loss={name} is a class. Pass an object of it: {name}().")
    if loss is not None and not callable(loss):
        raise LossError(
            f"loss={shown(loss)} must be a function called as loss(output, target), such as "
            "torch.nn.CrossEntropyLoss()."
        )


def check_optimizer_kind(optimizer: Any) -> None:
    """Refuse what neither is an optimizer nor can make one."""
    makes_none = isinstance(optimizer, type) and not issubclass(optimizer, Optimizer)
    if makes_none or not (isinstance(optimizer, Optimizer) or callable(optimizer)):
        raise TrainingError(
            f"optimizer={shown(optimizer)} is not an optimizer. Pass a torch optimizer over the "
            "model's parameters, or a function that makes one from them, such as torch.optim.AdamW."
        )


def check_switches(whose: str, **values: Any) -> None:
    """Refuse anything but ``True`` and ``False``: any other text or number would count as yes."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TrainingError(f"{whose}{name}={shown(value)} must be True or False.")


def check_call(call: Callable[..., Any], arguments: list[Any], named: Mapping[str, Any]) -> None:
    """Refuse a batch whose items do not fit what ``call`` (a model's forward) takes."""
    try:
        inspect.signature(call).bind(*arguments, **named)
    except TypeError as error:
        count = f"{len(arguments) + len(named)} item{'s' * (len(arguments) + len(named) != 1)}"
        names = f" ({', '.join(named)})" if named else ""
        raise LossError(
            f"the model is called with {count} of the batch{names}, and its forward"
            f"{inspect.signature(call)} does not take that: {error}. With loss= the last item of a "
            "batch is the target and the others go to the model; without it all of them do, and "
            "the model returns its own loss. Pass loss=, or forward= to call the model yourself."
        ) from error
