"""What may be passed to :class:`Engine`, :class:`Trainer`, ``prepare`` and ``verify``, by kind.

A wrong kind is answered here, in one sentence, before anything is built: not by an error from
somewhere inside a step. What the values mean together is checked by ``checks.py`` and the rules.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.errors import LossError, TrainingError
from paceline.parallel.pipeline.options import Pipelining
from paceline.parallel.shard import Sharding
from paceline.parallel.tensor.options import TensorParallel
from paceline.world import World

_SHOWN = 60


def check_arguments(
    model: Any, loss: Any, optimizer: Any, options: Mapping[str, Any], world: Any = None
) -> None:
    """Refuse arguments that are not of the kind that :class:`Engine` takes."""
    check_model(model)
    check_loss(loss)
    check_optimizer_kind(optimizer)
    if world is not None and not isinstance(world, World):
        raise TrainingError(
            f"world={shown(world)} must be a paceline.World. Leave it out for the world that this "
            "process was launched into."
        )
    for name, check in _CHECKS.items():
        if (value := options.get(name)) is not None:
            check(name, value)
    if options.get("max_memory") is not None and options.get("device_map") is None:
        raise TrainingError(
            "max_memory= bounds the devices of a device map, and there is none. Pass "
            "device_map='auto' with it, or leave it out."
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


def shown(value: Any) -> str:
    """``value`` as a user would write it, cut short."""
    text = value.__name__ if isinstance(value, type) else repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _positive(name: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or math.isnan(value) or not value > 0:
        raise TrainingError(
            f"{name}={shown(value)} must be a number greater than 0, or None for no clipping."
        )


def _samples(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TrainingError(f"{name}={shown(value)} must be a whole number of samples, 1 or more.")


def _switch(name: str, value: Any) -> None:
    check_switches("", **{name: value})


def _function(called: str) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if not callable(value):
            raise TrainingError(f"{name}={shown(value)} must be a function, called as {called}.")

    return check


def _made_with(kind: type) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise TrainingError(
                f"{name}={shown(value)} must be made with paceline.{kind.__name__}(…)."
            )

    return check


def _device_map(name: str, value: Any) -> None:
    if not isinstance(value, str | Mapping):
        raise TrainingError(
            f"{name}={shown(value)} must be 'auto' or a dict from the names of modules to devices."
        )


def _bounds(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TrainingError(
            f"{name}={shown(value)} must be a dict from devices to bytes, such as "
            "{'cuda:0': '20GiB'}."
        )


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "microbatch": _samples,
    "clip_norm": _positive,
    "clip_value": _positive,
    "compile": _switch,
    "sync_batchnorm": _switch,
    "forward": _function("forward(model, batch)"),
    "count": _function("count(batch)"),
    "init": _function("init(module)"),
    "sharding": _made_with(Sharding),
    "tensor": _made_with(TensorParallel),
    "pipeline": _made_with(Pipelining),
    "device_map": _device_map,
    "max_memory": _bounds,
}
"""By option, what its value must be; ``None`` is always its default."""
