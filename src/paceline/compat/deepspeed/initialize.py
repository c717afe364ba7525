"""``initialize``: from a DeepSpeed config and a model to an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.compat.deepspeed.engine import DeepSpeedEngine
from paceline.compat.deepspeed.optimizing import make_optimizer, make_scheduler
from paceline.compat.deepspeed.pipe import PipelineEngine, PipelineModule
from paceline.config.deepspeed.settings import DeepSpeedSettings, read_settings
from paceline.engine.optimizer_groups import Groups
from paceline.engine.prepare import prepare
from paceline.engine.whole_model import WholeModel
from paceline.errors import ConfigError, TrainingError
from paceline.options import Sharding
from paceline.parallel.offload import offload_state
from paceline.world import World

_ARGUMENTS = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("max_grad_norm",),
    "fp16.enabled": ("fp16",),
    "bf16.enabled": ("bf16",),
    "optimizer.params.lr": ("learning_rate", "lr"),
    "optimizer.params.weight_decay": ("weight_decay",),
    "optimizer.params.eps": ("adam_epsilon",),
    "scheduler.params.warmup_max_lr": ("learning_rate", "lr"),
    "scheduler.params.warmup_num_steps": ("warmup_steps",),
    "scheduler.params.total_num_steps": ("max_steps",),
}
"""What Hugging Face's training arguments say of keys that are "auto"."""
_PLAIN = {
    "gradient_accumulation_steps": 1,
    "fp16.enabled": False,
    "bf16.enabled": False,
    "gradient_clipping": 1.0,
    "scheduler.params.warmup_min_lr": 0.0,
    "fp16.loss_scale": 0,
}
"""What "auto" stands for where nothing else says."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> tuple[DeepSpeedEngine | PipelineEngine, Optimizer | None, Any, Any]:
    """An engine for ``model`` by a DeepSpeed config, the optimizer, a loader, and the scheduler.

    ``config`` is ``ds_config.json`` or the mapping in it; else ``args.deepspeed_config`` is. Keys
    that say "auto" take what ``args`` says under the names of Hugging Face's training arguments,
    such as ``args.per_device_train_batch_size``. What the config asks for that is not there is
    refused by name, and notes on the rest are printed once, on rank 0.
    """
    if model is None:
        raise TrainingError("deepspeed.initialize: model= is missing: pass the module to train.")
    if mpu is not None or mesh_param is not None:
        raise TrainingError(
            "deepspeed.initialize: mpu= and mesh_param= are of another library's tensor "
            "parallelism. Leave them out: tensor parallelism is layout='tp=2' of paceline.Engine."
        )
    world = World.init()
    auto = _answers(args)
    settings = _complete(read_settings(_config_of(args, config, config_params), auto))
    _print_once(world, settings)
    if isinstance(model, PipelineModule):
        pipeline = PipelineEngine(model, settings, optimizer, model_parameters, lr_scheduler)
        data = None if training_data is None else pipeline.read(training_data, collate_fn)
        return pipeline, pipeline.optimizer, data, pipeline.lr_scheduler
    if settings.tp > 1:
        raise ConfigError(
            f"DeepSpeed config: tensor_parallel.autotp_size={settings.tp} needs a config of "
            "Paceline's (deepspeed: ds_config.json) or paceline.Engine(layout='tp=…'): a loop with "
            "its own backward() has no batch to plan by."
        )
    return _spread(model, settings, optimizer, model_parameters, training_data, lr_scheduler,
                   collate_fn, world)  # fmt: skip


def _spread(
    model: nn.Module,
    settings: DeepSpeedSettings,
    optimizer: Any,
    parameters: Iterable[Any] | None,
    data: Any,
    lr_scheduler: Any,
    collate_fn: Any,
    world: World,
) -> tuple[DeepSpeedEngine, Optimizer | None, Any, Any]:
    batch = settings.batch.on(world.size)
    made = make_optimizer(optimizer, model, parameters, settings)
    whole = WholeModel(model)
    names = [] if made is None else Groups(made, model).names
    loader = None
    if data is not None:
        loader = DataLoader(
            data,
            batch_size=batch.micro_batch,
            shuffle=True,
            collate_fn=collate_fn,
            drop_last=settings.drop_last,
        )
    if made is None:
        model.to(world.device)
        engine = DeepSpeedEngine(
            model, model, None, settings, whole=whole, group_names=[], loader=loader
        )
        return engine, None, loader, None
    sharding = None
    if settings.zero:
        offload = settings.offload if settings.offload == "parameters" else None
        sharding = Sharding(offload=offload, reshard=settings.reshard)
    wrapped, made, prepared = prepare(
        model,
        made,
        loader,
        layout=f"dp={world.size},zero={settings.zero}",
        sharding=sharding,
        per_device_batch=batch.micro_batch if loader is not None else None,
        accumulate=batch.accumulation if loader is not None else None,
    )
    scheduler = make_scheduler(lr_scheduler, made, settings)
    engine = DeepSpeedEngine(
        model,
        wrapped,
        made,
        settings,
        lr_scheduler=scheduler,
        loader=prepared,
        whole=whole,
        group_names=names,
    )
    if settings.offload == "optimizer":
        offload_state(made)
    return engine, made, prepared, scheduler


def _config_of(args: Any, config: Any, config_params: Any) -> Any:
    named = getattr(args, "deepspeed_config", None)
    named = named or getattr(args, "deepscale_config", None)
    given = [value for value in (config, config_params, named) if value is not None]
    if not given:
        raise ConfigError(
            "deepspeed.initialize: there is no DeepSpeed config. Pass config= (a path or a dict), "
            "or start the script with --deepspeed_config ds_config.json."
        )
    if any(other != given[0] for other in given[1:]):
        raise ConfigError(
            f"deepspeed.initialize: config= and --deepspeed_config {named} are two configs. Give "
            "one of them."
        )
    return given[0]


def _answers(args: Any) -> dict[str, Any]:
    """What ``args`` says of keys that may be "auto"."""
    found = {}
    for key, names in _ARGUMENTS.items():
        for name in names:
            value = getattr(args, name, None)
            if value is not None and (name != "max_steps" or value > 0):  # -1: epochs say it
                found[key] = value
    betas = [getattr(args, f"adam_beta{i}", None) for i in (1, 2)]
    if None not in betas:
        found["optimizer.params.betas"] = betas
    return {**_PLAIN, **found}


def _complete(settings: DeepSpeedSettings) -> DeepSpeedSettings:
    """``settings`` where nothing that matters is left to be filled in."""
    resolved = ("optimizer.params.betas", "optimizer.params.eps", "optimizer.params.weight_decay")
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu")
    said = settings.batch.train_batch_size or settings.batch.micro_batch
    for key in settings.autos:
        if key in resolved or (key in batch and said) or key == "scheduler.params.warmup_max_lr":
            continue
        names = _ARGUMENTS.get("train_micro_batch_size_per_gpu" if key in batch else key, ())
        hint = f", or pass args with {names[0]} in it" if names else ""
        raise ConfigError(
            f'DeepSpeed config: {key} is "auto", and nothing says what it stands for. Write the '
            f"number{hint}."
        )
    return settings


def _print_once(world: World, settings: DeepSpeedSettings) -> None:
    if world.rank == 0:
        for note in settings.notes:
            print(f"paceline.compat.deepspeed: {note}", flush=True)
