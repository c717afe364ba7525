"""For people who keep their own loop, as they write it with Accelerate: its parts, spread."""

from __future__ import annotations

import builtins
import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Never

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from paceline.checkpoint.checkpoints import Checkpoints, Restored
from paceline.checkpoint.saveable import Stateful, checked_objects
from paceline.data import Loader
from paceline.data import loader as make_loader
from paceline.engine.arguments import check_model
from paceline.engine.checks import check_optimizer
from paceline.engine.gathering import gathered, samples_only
from paceline.engine.gradients import Gradients
from paceline.engine.initial_weights import (
    check_not_spread,
    start_from_one_model,
    start_from_one_optimizer,
)
from paceline.engine.loss_scale import AgreedScaler
from paceline.engine.optimizer_groups import Groups
from paceline.engine.own_loop import SpreadModel, WeightedGradient, spread
from paceline.engine.pass_loader import PassLoader
from paceline.engine.precision import Precision
from paceline.engine.prepared_optimizer import LoopState, OptimizerControl, PreparedSchedule
from paceline.engine.prepared_state import PreparedState
from paceline.errors import CheckpointError, DataError, TrainingError
from paceline.layout import Layout
from paceline.nested import map_tensors
from paceline.options import Checkpointing, EngineOptions, LossScaling, Sharding
from paceline.options.arguments import refuse_unknown
from paceline.options.engine import InitialWeights
from paceline.options.engine import Precision as PrecisionName
from paceline.options.rules import layout_in_world
from paceline.parallel.distributed_model import DistributedModel
from paceline.parallel.dtensor import whole
from paceline.parallel.meta import Init
from paceline.parallel.replicate import sync_buffers
from paceline.world import World, collectives

_ELSEWHERE = {
    "end_training": "not needed: trackers of your own are closed by you, nothing else is open",
    "free_memory": "not needed: let go of what prepare returned",
    "get_state_dict": "accelerator.state_dict(model)",
    "is_last_process": "accelerator.world.rank == accelerator.world.size - 1",
    "is_local_main_process": "accelerator.world.local_rank == 0",
    "load_checkpoint": "accelerator.load_state(folder)",
    "local_process_index": "accelerator.world.local_rank",
    "log": "the call of your tracker, on accelerator.is_main_process",
    "num_processes": "accelerator.world.size",
    "optimizer_step_was_skipped": "accelerator.step_was_skipped()",
    "process_index": "accelerator.world.rank",
    "reduce": "paceline.collectives.all_reduce(tensor, 'mean')",
    "save_checkpoint": "accelerator.save_state(folder)",
    "save_model": "torch.save(accelerator.state_dict(model), path) on accelerator.is_main_process",
    "skip_first_batches": "not needed: load_state puts loaders where they stood",
    "unwrap_model": "accelerator.unwrap(model)",
    "wait_for_everyone": "paceline.collectives.barrier()",
}
"""What Accelerate has under these names."""
BatchSizeIs = Literal["global", "per_device"]


class Accelerator:
    """A loop of your own on any number of ranks: prepare its parts, and keep writing it.

        accelerator = paceline.Accelerator(precision="bf16", accumulate=4)
        model, optimizer, loader, schedule = accelerator.prepare(
            model, optimizer, loader, schedule
        )
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    Args:
        precision: of the forward pass: ``fp32``; ``bf16`` or ``fp16`` by autocast, whose results
            leave the model in float32; ``fp64`` throughout.
        loss_scaling: the settings of fp16's gradient scaler.
        accumulate: batches that make one optimizer step; fewer at the end of an epoch.
        layout: data-parallel over all ranks (``auto``), or sharded, such as ``dp=4,zero=3``.
        sharding: how ``zero`` shards models.
        batch_size_is: what the batch size of a DataLoader is: ``global``, the samples of a batch
            over all ranks, or ``per_device``, those of each rank. Left out it is global, and a
            line says so.
        seed: orders the samples of DataLoaders that shuffle.
        initial_weights: what ranks start from: the models of rank 0, or each its ``own``.
        init: gives values to models from the meta device.
    """

    def __init__(
        self,
        *,
        precision: PrecisionName = "fp32",
        loss_scaling: LossScaling | None = None,
        accumulate: int = 1,
        layout: str | Layout = "auto",
        sharding: Sharding | None = None,
        batch_size_is: BatchSizeIs | None = None,
        seed: int = 0,
        initial_weights: InitialWeights = "rank0",
        init: Init | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown(Accelerator, unknown)
        if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
            raise TrainingError(f"accumulate={accumulate!r} must be a whole number, 1 or more.")
        if batch_size_is not in (None, "global", "per_device"):
            raise TrainingError(
                f"batch_size_is={batch_size_is!r} must be 'global' (the samples of a batch over "
                "all ranks) or 'per_device' (those of each rank)."
            )
        self.world = World.current()
        self._options = EngineOptions.of(
            layout=layout,
            sharding=sharding,
            precision=precision,
            loss_scaling=loss_scaling,
            initial_weights=initial_weights,
            init=init,
        )
        self.layout = layout_in_world(self._options, self.world.size, own_loop=True)
        self._seed, self._batch_size_is = seed, batch_size_is
        self._precision = Precision(precision, self.world.device)
        self._loop = LoopState(self.world, accumulate)
        if precision == "fp16":
            alone = self.world.size == 1 or not self.layout.zero
            self._loop.scaler = AgreedScaler(
                self.world.device, self._options.loss_scaling, alone=alone
            )
        self._models: list[SpreadModel] = []
        self._controls: list[OptimizerControl] = []
        self._schedules: list[PreparedSchedule] = []
        self._loaders: list[PassLoader] = []
        self._objects: dict[str, Stateful] = {}
        self._active: PassLoader | None = None
        self._said: set[str] = set()

    # ------------------------------------------------------------------ preparing

    def prepare(self, *parts: Any) -> Any:
        """Spread models, optimizers, DataLoaders and torch's schedulers; returns them in order.

        May be called several times, an optimizer with its model or after it. Every rank calls it.
        One part alone is returned by itself. Anything else is returned as it is.
        """
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

    def _say(self, text: str) -> None:
        """A line on rank 0, once."""
        if self.world.is_main and text not in self._said:
            self._said.add(text)
            logging.getLogger("paceline").warning(text)

    def _drew(self, loader: PassLoader) -> None:
        """A batch is about to be handed over."""
        self._active = loader
        self._loop.accumulation = loader.accumulation
        if loader.accumulation.begins_step and self.world.size > 1:
            for made in self._models:
                sync_buffers(made.model, self.world.everyone)
        self.world.pulse.beat()

    # ------------------------------------------------------------------ the step

    @property
    def sync_gradients(self) -> bool:
        """Whether the batch at hand ends an optimizer step."""
        return self._loop.accumulation.ends_step

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Around the forward, backward and step of a batch: ranks talk in the last of a step alone.

        ``models``: those that the block trains; all that were prepared, if none is named.
        """
        if self._active is None:
            self._loop.by_hand.begin_pass()
        with contextlib.nullcontext() if self.sync_gradients else self.no_sync(*models):
            yield

    @contextlib.contextmanager
    def no_sync(self, *models: nn.Module) -> Iterator[None]:
        """Backwards in it add to each rank's own gradients, and send nothing. On one rank, too."""
        with contextlib.ExitStack() as stack:
            for model in models or [made.called for made in self._models]:
                stack.enter_context(self._spread_of(model).called.no_sync())  # type: ignore[operator]
            yield

    def backward(
        self, loss: Tensor, *, count: float | Tensor | None = None, **options: Any
    ) -> None:
        """``loss.backward()``, weighed so that a step has the gradient of its mean loss.

        The loss is a mean over this rank's samples of the batch, or over ``count`` items (tokens
        that are not padding, say). Do not divide it by the number of batches of a step.
        """
        accumulation = self._loop.accumulation
        items = None if count is None else float(count)
        self._loop.begin_backward([made.sharded for made in self._models if made.sharded])
        weight = accumulation.weight(items) * self._loop.factor_before
        if self._loop.scaler is not None:
            loss = self._loop.scaler.scale(loss)
        if weight != 1:
            loss = WeightedGradient.apply(loss, weight)
        loss.backward(**options)

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter] | nn.Parameter, max_norm: float
    ) -> Tensor | None:
        """Clip the norm of the gradients of ``parameters``, whatever the layout and precision.

        Returns the norm before; ``None`` before the last batch of a step, when there is nothing
        to clip yet.
        """
        own = self._finished(parameters)
        if own is None:
            return None
        gradients = Gradients(own, self._counts(), self.world.device)
        norm = gradients.norm()
        gradients.clip_norm(max_norm, norm)
        return norm

    def clip_grad_value_(
        self, parameters: Iterable[nn.Parameter] | nn.Parameter, clip_value: float
    ) -> None:
        """Bound each element of the gradients of ``parameters``."""
        if (own := self._finished(parameters)) is not None:
            Gradients(own, None, self.world.device).clip_values(clip_value)

    def _finished(
        self, parameters: Iterable[nn.Parameter] | nn.Parameter
    ) -> list[nn.Parameter] | None:
        if not self.sync_gradients:
            return None
        own = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
        wanted = {id(parameter) for parameter in own}
        for control in self._controls:
            if wanted & {id(parameter) for parameter in control.parameters}:
                control.finish()
        return own

    def _counts(self) -> Any:
        """Who counts in a norm; ``None`` where every rank has the whole gradient."""
        if not self.layout.zero:
            return None
        model = self._models[0].model
        return DistributedModel(model, model, self.layout, self.world).counts_in_norm

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision of the forward pass, for a loss that is to be computed in it as well."""
        return self._precision.forward()

    def step_was_skipped(self, optimizer: Optimizer | None = None) -> bool:
        """Whether the last step of ``optimizer``, or of any, was left out for an overflow."""
        return any(
            control.was_skipped
            for control in self._controls
            if optimizer is None or control.optimizer is optimizer
        )

    @property
    def loss_scale(self) -> float | None:
        """What fp16 multiplies losses by now; ``None`` in other precisions."""
        self._loop.settle_scale()
        return None if self._loop.scaler is None else self._loop.scaler.get_scale()

    # ------------------------------------------------------------------ the ranks

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.world.device

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.world.is_main

    def print(self, *values: Any, **options: Any) -> None:
        """``print`` on rank 0 alone."""
        if self.world.is_main:
            builtins.print(*values, **options)

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """A block that rank 0 runs before the others, to download or to write a cache, say."""
        if not self.world.is_main:
            collectives.barrier()
        try:
            yield
        finally:
            if self.world.is_main:
                collectives.barrier()

    def gather(self, values: Any) -> Any:
        """Tensors of all ranks put together along dimension 0, in ``values`` of any structure."""
        return gathered(values, self.world)

    def gather_for_metrics(self, values: Any) -> Any:
        """What all ranks computed for a batch: each of its samples once, in the data's order.

        Of tensors, dimension 0 must be the samples; a scalar (a loss) stands for each of them.
        """
        if self._active is None or self._active.share is None or self._active.rows is None:
            return gathered(values, self.world)
        own = samples_only(values, self._active.rows, self._active.share.samples)
        return gathered(own, self.world)

    def __getattr__(self, name: str) -> Never:
        if name in _ELSEWHERE:
            raise AttributeError(f"accelerator.{name} is {_ELSEWHERE[name]} here.")
        raise AttributeError(f"'Accelerator' object has no attribute {name!r}")

    # ------------------------------------------------------------------ models and state

    def _spread_of(self, model: nn.Module) -> SpreadModel:
        for made in self._models:
            if model is made.called or model is made.model:
                return made
        raise TrainingError(
            f"this {type(model).__name__} was not prepared: pass it to accelerator.prepare first."
        )

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model as you passed it to ``prepare``; sharded, its parameters stay parts."""
        return self._spread_of(model).model

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """The whole weights of a model on the CPU, whatever the layout. Every rank calls it."""
        found = self.unwrap(model).state_dict()
        return {
            name: whole(value).detach().cpu() if isinstance(value, Tensor) else value
            for name, value in found.items()
        }

    @property
    def steps_done(self) -> int:
        """Optimizer steps so far; of several optimizers, those of the one that has done most."""
        return max((control.steps for control in self._controls), default=0)

    def register_for_checkpointing(self, **objects: Stateful) -> None:
        """Have more saved and loaded, by name: anything with a state_dict and a load_state_dict."""
        self._objects |= checked_objects(objects)

    def save_state(self, folder: str | os.PathLike[str], *, keep: int = 2) -> str:
        """Save all that was prepared, and each rank's random state; returns where.

        Models, optimizers, schedules, the scaler, loader positions and what was registered. The
        newest ``keep`` states of a folder stay. Every rank calls it, between steps.
        """
        if not self._loop.accumulation.ends_step:
            raise TrainingError(
                "save_state: in the middle of a step, whose gradients so far would be lost. Call "
                "it where accelerator.sync_gradients is true."
            )
        with self._checkpoints(folder, keep) as checkpoints:
            checkpoints.save(wait=True)
            [(outcome, _, _)] = checkpoints.finished(wait=True)
        if outcome.error is not None:
            raise CheckpointError(outcome.error)
        return str(outcome.path)

    def load_state(
        self, folder: str | os.PathLike[str], *, required: bool = True
    ) -> Restored | None:
        """Go on from the newest good state in ``folder``, on any number of ranks and layout.

        Loaders stand where they stood: nothing has to be skipped. Random state is restored on as
        many ranks as there were. Without a state there it is an error, or ``None`` where none is
        ``required``. Every rank calls it, after ``prepare``.
        """
        with self._checkpoints(folder, 1) as checkpoints:
            restored = checkpoints.restore()
            if restored is None and required:
                raise CheckpointError(
                    f"load_state: there is no state in {os.fspath(folder)}. Look at the path, or "
                    "pass required=False to begin anew."
                )
            state = checkpoints.engine
            assert isinstance(state, PreparedState)
            if restored is not None:
                state.loaded()
            return restored

    def _checkpoints(self, folder: str | os.PathLike[str], keep: int) -> Checkpoints:
        if not self._models:
            raise TrainingError("save_state, load_state: call prepare with a model first.")
        state = PreparedState(
            [made.model for made in self._models],
            self._controls,
            self._schedules,
            self._loop,
            self.layout,
        )
        loaders = {f"loader_{number}": one for number, one in enumerate(self._loaders)}
        options = Checkpointing(keep=keep, asynchronous=False)
        return Checkpoints(folder, state, objects={**loaders, **self._objects}, options=options)


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
