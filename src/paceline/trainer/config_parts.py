"""What a config names beside model and data: optimizer, schedule, metrics, callbacks, collate."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, ReduceLROnPlateau, SequentialLR

import paceline.schedules as schedules
from paceline.config import Config, import_target, learning_rate, lr_factor
from paceline.config.code import code_folders
from paceline.config.named_targets import LENGTHS, scheduler_path, torchmetrics_path
from paceline.config.training import ParameterGroup
from paceline.credentials import revealed
from paceline.data import steps_per_epoch
from paceline.engine.arguments import LRSchedule
from paceline.engine.learning_rate import makes_scheduler
from paceline.engine.parameter_groups import parameter_groups
from paceline.errors import ConfigError, TrainingError
from paceline.trainer.callbacks import Callback, EarlyStopping
from paceline.trainer.evaluate import Metric, WholeSet


def arguments_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """``args`` with the credentials that they refer to, which no other process gets to see."""
    return cast(dict[str, Any], revealed(args, everywhere=False))


def make_function(config: Config, target: str, args: Mapping[str, Any]) -> Any:
    """A class makes the function; a function is it, with its arguments filled in."""
    found = import_target(target, code_folders(config))
    arguments = arguments_of(args)
    if inspect.isclass(found):
        return found(**arguments)
    return functools.partial(found, **arguments) if arguments else found


def make_optimizer(config: Config, model: nn.Module) -> Optimizer:
    """The optimizer over the trainable parameters of ``model``, at the scaled rate."""
    section = config.optimizer
    arguments = {"lr": learning_rate(config), **arguments_of(section.args)}
    if section.weight_decay is not None:
        arguments["weight_decay"] = section.weight_decay
    parameters: list[Any] = [p for p in model.parameters() if p.requires_grad]
    if section.groups or section.decay != "all":
        rules = [(one.match, _settings(config, one)) for one in section.groups]
        try:
            parameters = parameter_groups(
                model, rules, weight_decay=section.weight_decay, decay=section.decay
            )
        except TrainingError as error:
            told = str(error).removeprefix("parameter_groups: ")
            raise ConfigError(f"optimizer.groups: {told}") from None
    return import_target(section.target, code_folders(config))(parameters, **arguments)


def _settings(config: Config, group: ParameterGroup) -> dict[str, Any]:
    settings = arguments_of(group.args)
    if group.lr is not None:
        # schedule.lr_scaling goes for all rates alike.
        settings["lr"] = group.lr * learning_rate(config) / config.optimizer.lr
    if group.weight_decay is not None:
        settings["weight_decay"] = group.weight_decay
    return settings


def make_schedule(config: Config, train: Any, optimizer: Optimizer | None = None) -> LRSchedule:
    """The factor on the learning rate as a function of the step, or a scheduler of ``optimizer``.

    Without an optimizer, a scheduler is refused.
    """
    schedule, total = config.schedule, _total(config, train)
    target = scheduler_path(schedule.name)
    warmup = _warmup(config, train)
    if target is None:
        stepped = schedule.model_copy(update={"warmup_steps": warmup})
        return lambda step: lr_factor(stepped, step, total)
    found = import_target(target, code_folders(config))
    args = arguments_of(schedule.args)
    interval = schedule.every or "step"
    if not makes_scheduler(found):
        factor = make_function(config, target, schedule.args)
        return schedules.every(
            interval, lambda done: (done + 1) / warmup if done < warmup else factor(done - warmup)
        )
    if optimizer is None:
        raise ConfigError(
            f"schedule.name={schedule.name}: a scheduler goes with its optimizer, and there is "
            "none here. Use constant, linear or cosine, or a function from the step to a factor."
        )
    if found is ReduceLROnPlateau:
        return schedules.every("evaluation", found(optimizer, **args), metric=schedule.metric)
    rest = None if total is None else max(total - warmup, 1)
    made = _scheduler(found, _filled(found, args, optimizer, rest), optimizer, warmup)
    return schedules.every(interval, made)


def _filled(
    found: Any, args: dict[str, Any], optimizer: Optimizer, steps: int | None
) -> dict[str, Any]:
    """``args`` with the length of the run and the full rates, where the scheduler asks for them."""
    asked = inspect.signature(found).parameters
    filled = dict(args)
    others = {"epochs", "steps_per_epoch"} & args.keys()  # OneCycleLR may be given these instead
    for name in LENGTHS:
        if name in asked and name not in args and not others:
            if steps is None:
                raise ConfigError(
                    f"schedule.args.{name} must say how many steps the schedule has: this data "
                    "does not say how long an epoch is. Set it, or train.steps."
                )
            filled[name] = steps
    if asked.get("max_lr") is not None and "max_lr" not in args:
        filled["max_lr"] = [group["lr"] for group in optimizer.param_groups]
    return filled


def _scheduler(found: Any, args: dict[str, Any], optimizer: Optimizer, warmup: int) -> LRScheduler:
    if not warmup:
        made = found(optimizer, **args)
    else:
        rise = LinearLR(optimizer, start_factor=1 / warmup, total_iters=max(warmup - 1, 1))
        made = SequentialLR(optimizer, [rise, found(optimizer, **args)], milestones=[warmup])
    if not isinstance(made, LRScheduler):
        raise ConfigError(
            f"schedule.name: {found.__name__} made a {type(made).__name__}, not a scheduler of "
            "torch. Return one, or take the step instead of the optimizer and return a factor."
        )
    return made


def _total(config: Config, train: Any) -> int | None:
    """How long the run is, in what the schedule counts; ``None`` where that is not known."""
    steps, epochs = config.train.steps, config.train.epochs
    if config.schedule.every == "epoch":
        return epochs
    per_epoch = _steps_per_epoch(config, train)
    if steps is None and epochs is not None and per_epoch is not None:
        return epochs * per_epoch
    return steps


def _warmup(config: Config, train: Any) -> int:
    """How long the warm-up is, in what the schedule counts."""
    schedule = config.schedule
    if schedule.warmup_epochs is None:
        return schedule.warmup_steps
    if schedule.every == "epoch":
        return int(schedule.warmup_epochs)
    if (per_epoch := _steps_per_epoch(config, train)) is None:
        raise ConfigError(
            f"schedule.warmup_epochs={schedule.warmup_epochs:g}: this data does not say how long "
            "an epoch is. Give schedule.warmup_steps instead."
        )
    return round(schedule.warmup_epochs * per_epoch)


def _steps_per_epoch(config: Config, train: Any) -> int | None:
    if not hasattr(train, "__len__"):
        return None
    return steps_per_epoch(len(train), config.batch.global_batch, config.data.drop_last)


def unsaid_interval(config: Config) -> str | None:
    """A line where a config leaves open what its scheduler counts."""
    schedule = config.schedule
    target = scheduler_path(schedule.name)
    if schedule.every is not None or target is None or schedule.name == "ReduceLROnPlateau":
        return None
    if not makes_scheduler(import_target(target, code_folders(config))):
        return None  # a function of the step
    return (
        f"schedule.name={schedule.name} counts optimizer steps, not epochs. Set schedule.every to "
        "step, if that is meant, or to epoch"
    )


def make_metrics(config: Config) -> dict[str, Metric]:
    """The metrics that ``config`` names, by name."""
    made: dict[str, Metric] = {}
    for name, section in config.metrics.items():
        target: str | None = section.target
        if ":" not in section.target:
            target = torchmetrics_path(section.target, code_folders(config))
        if target is None:
            raise ConfigError(
                f"metrics.{name}: torchmetrics has no {section.target!r} on this machine, or is "
                "not installed. Install the same version on every machine."
            )
        metric = make_function(config, target, section.args)
        made[name] = WholeSet(metric) if section.whole_set else metric
    return made


def make_callbacks(config: Config) -> list[Callback]:
    """Early stopping and the callbacks that ``config`` names."""
    made: list[Callback] = []
    if (stopping := config.early_stopping) is not None:
        made.append(EarlyStopping(**stopping.model_dump()))
    for number, section in zip(itertools.count(), config.callbacks, strict=False):
        build: Callable[..., Any] = import_target(section.target, code_folders(config))
        callback = build(**arguments_of(section.args))
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks.{number}.target {section.target!r} made a {type(callback).__name__}, "
                "not a paceline.Callback. Name a class derived from it, or a function that returns "
                "an object of one."
            )
        made.append(callback)
    return made


def make_collate(config: Config) -> Callable[..., Any] | None:
    """What makes a batch of a list of samples; ``None``: as torch does."""
    section = config.data.collate_fn
    return None if section is None else make_function(config, section.target, section.args)
