"""The parts of a loop of the user's own: models, optimizers, loaders and schedules, spread."""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from paceline.checkpoint.saveable import Stateful
from paceline.data import Loader
from paceline.data import loader as make_loader
from paceline.engine.arguments import check_model
from paceline.engine.checks import check_optimizer
from paceline.engine.initial_weights import (
    check_not_spread,
    start_from_one_model,
    start_from_one_optimizer,
)
from paceline.engine.loss_scale import AgreedScaler
from paceline.engine.optimizer_groups import Groups
from paceline.engine.own_loop import SpreadModel, spread
from paceline.engine.pass_loader import PassLoader
from paceline.engine.precision import Precision
from paceline.engine.prepared_optimizer import LoopState, OptimizerControl, PreparedSchedule
from paceline.errors import DataError, TrainingError
from paceline.nested import map_tensors
from paceline.options import EngineOptions
from paceline.options.rules import layout_in_world
from paceline.parallel.replicate import sync_buffers
from paceline.schedules import SteppedSchedule
from paceline.world import World

BatchSizeIs = Literal["global", "per_device"]


def _check_no_container(part: Any) -> None:
    """Refuse a list or dict of parts, which would come back as it is, spread over no rank."""
    held = part.values() if isinstance(part, dict) else part
    if isinstance(part, list | tuple | set | dict) and any(
        isinstance(one, nn.Module | Optimizer | DataLoader | LRScheduler) for one in held
    ):
        raise TrainingError(
            f"prepare: got a {type(part).__name__} of parts; give them one by one, as in "
            "accelerator.prepare(*parts)."
        )


class AcceleratorParts:
    """What was prepared, and how the loop it belongs to stands."""

    def __init__(
        self,
        options: EngineOptions,
        *,
        accumulate: int,
        batch_size_is: BatchSizeIs | None,
        seed: int,
    ) -> None:
        self.world = World.current()
        self._options = options
        self.layout = layout_in_world(options, self.world.size, own_loop=True)
        self._seed, self._batch_size_is = seed, batch_size_is
        self._precision = Precision(options.precision, self.world.device)
        self._loop = LoopState(self.world, accumulate)
        if options.precision == "fp16":
            alone = self.world.size == 1 or not self.layout.zero
            self._loop.scaler = AgreedScaler(self.world.device, options.loss_scaling, alone=alone)
        self._models: list[SpreadModel] = []
        self._controls: list[OptimizerControl] = []
        self._schedules: list[PreparedSchedule] = []
        self._loaders: list[PassLoader] = []
        self._objects: dict[str, Stateful] = {}
        self._active: PassLoader | None = None
        self._said: set[str] = set()

    def _say(self, text: str) -> None:
        """A line on rank 0, once."""
        if self.world.is_main and text not in self._said:
            self._said.add(text)
            logging.getLogger("paceline").warning(text)

    def _spread_of(self, model: nn.Module) -> SpreadModel:
        for made in self._models:
            if model is made.called or model is made.model:
                return made
        raise TrainingError(
            f"this {type(model).__name__} was not prepared: pass it to accelerator.prepare first."
        )


class PreparingAccelerator(AcceleratorParts):
    """The part of ``paceline.Accelerator`` that spreads what it is given."""

    def prepare(self, *parts: Any) -> Any:
        """Spread models, optimizers, DataLoaders and torch's schedulers; returns them in order.

        May be called several times, an optimizer with its model or after it. Every rank calls it.
        One part alone is returned by itself. Anything else is returned as it is.
        """
        for part in parts:
            _check_no_container(part)
        models = [part for part in parts if isinstance(part, nn.Module)]
        optimizers = [part for part in parts if isinstance(part, Optimizer)]
        known = [made.model for made in self._models]
        for model in models:
            check_model(model)
            check_not_spread(model)
            if model in known or isinstance(model, DistributedDataParallel):
                raise TrainingError(
                    f"prepare: this {type(model).__name__} was prepared already, or is wrapped in "
                    "DDP by hand. Pass each model once, as you have built it."
                )
        all_models = nn.ModuleList([*known, *models])
        for optimizer in optimizers:
            check_optimizer(optimizer, all_models)
        groups = [Groups(optimizer, all_models) for optimizer in optimizers]
        if models:
            self._start_alike(models)
        for optimizer in optimizers:
            start_from_one_optimizer(optimizer, all_models, self.world)
        made: dict[int, Any] = {id(model): self._prepare_model(model) for model in models}
        held = {name: [parameter] for name, parameter in all_models.named_parameters()}
        for optimizer, names in zip(optimizers, groups, strict=True):
            if models and self.layout.zero:
                names.repoint(optimizer, held)
            self._control(optimizer)
            made[id(optimizer)] = optimizer
        for part in parts:
            if isinstance(part, Loader | DataLoader):
                made[id(part)] = self._prepare_loader(part)
            elif isinstance(part, SteppedSchedule):
                raise TrainingError(
                    f"prepare: every({part.interval!r}, …) is for Engine and Trainer, which step "
                    "schedules by themselves. Pass the scheduler, and call its step() where it is "
                    "to count: after each batch, or after each epoch."
                )
            elif isinstance(part, LRScheduler):
                made[id(part)] = self._prepare_schedule(part)
        results = tuple(made.get(id(part), part) for part in parts)
        return results[0] if len(results) == 1 else results

    def _start_alike(self, models: list[nn.Module]) -> None:
        settings = {
            "layout": str(self.layout),
            "precision": self._precision.name,
            "accumulate": self._loop.by_hand.passes,
            "initial_weights": self._options.initial_weights,
        }
        for note in start_from_one_model(
            models[0] if len(models) == 1 else nn.ModuleList(models),
            self.world,
            initial_weights=self._options.initial_weights,
            settings=settings,
        ):
            self._say(note)

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        self._precision.prepare(model)
        if self._precision.name != "fp32":
            _compute_in(model, self._precision)
        made = spread(model, self.layout, self.world, self._options, self._loop)
        self._models.append(made)
        return made.called

    def _control(self, optimizer: Optimizer) -> None:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        sharded = [
            made.sharded
            for made in self._models
            if made.sharded is not None and any(id(p) in own for p in made.model.parameters())
        ]
        if any(own & {id(p) for p in control.parameters} for control in self._controls):
            raise TrainingError(
                "prepare: a parameter belongs to two optimizers. Give each parameter to one, or "
                "prepare the optimizer only once."
            )
        self._controls.append(OptimizerControl(optimizer, sharded, self._loop))

    def _prepare_schedule(self, schedule: LRScheduler) -> PreparedSchedule:
        for control in self._controls:
            if control.optimizer is schedule.optimizer:
                prepared = PreparedSchedule(schedule, control)
                self._schedules.append(prepared)
                return prepared
        raise TrainingError(
            f"prepare: the optimizer of this {type(schedule).__name__} was not prepared. Pass both "
            "in one call, or the optimizer first."
        )

    def _prepare_loader(self, data: Loader | DataLoader[Any]) -> PassLoader:
        if isinstance(data, Loader):
            data.follow(self.layout)
            loader = data
            if loader.passes > 1:
                raise DataError(
                    "prepare: the loader cuts its batches for accumulation by itself. Make it with "
                    "the size of one batch, and say Accelerator(accumulate=…)."
                )
        else:
            size = data.batch_size if isinstance(data.batch_size, int) else None
            sizes: dict[str, Any] = {}
            if size is not None and self._batch_size_is is not None:
                name = "global_batch" if self._batch_size_is == "global" else "per_device_batch"
                sizes[name] = size
            loader = make_loader(data, seed=self._seed, layout=self.layout, **sizes)
            if size is not None:
                self._say_size(size)
            loader.take_note()  # it has been said, with the words that help here
        prepared = PassLoader(
            loader,
            self._loop.by_hand.passes,
            self.world,
            dtype=self._precision.batch_dtype,
            drawn=self._drew,
        )
        self._loaders.append(prepared)
        return prepared

    def _say_size(self, size: int) -> None:
        ranks, passes = self.layout.dp, self._loop.by_hand.passes
        if ranks == 1:
            return
        step = f" A step takes {passes} batches" if passes > 1 else ""
        if self._batch_size_is == "per_device":
            step = step and f"{step}, {size * ranks * passes} samples."
            told = (
                f"a batch is {size} samples on each of {ranks} ranks, {size * ranks} in all.{step}"
            )
            logging.getLogger("paceline").info(f"DataLoader(batch_size={size}): {told}")
            return
        if self._batch_size_is is None:
            step = step and f"{step}, {size * passes} samples."
            self._say(
                f"DataLoader(batch_size={size}): that is the global batch, {size / ranks:g} "
                f"samples on each of {ranks} ranks.{step} For {size} on each rank make "
                "Accelerator(batch_size_is='per_device'); if it is meant so, 'global'."
            )

    def _drew(self, loader: PassLoader) -> None:
        """A batch is about to be handed over."""
        self._active = loader
        self._loop.accumulation = loader.accumulation
        if loader.accumulation.begins_step and self.world.size > 1:
            for made in self._models:
                sync_buffers(made.model, self.world.everyone)
        self.world.pulse.beat()


def _compute_in(model: nn.Module, precision: Precision) -> None:
    """Have ``model`` compute in ``precision``, and its results leave in float32."""
    forward = model.forward

    def cast(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor

    def run(*args: Any, **kwargs: Any) -> Any:
        with precision.forward():
            output = forward(*args, **kwargs)
        return output if precision.name == "fp64" else map_tensors(output, cast)

    model.forward = run
