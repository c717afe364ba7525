"""Builds an engine's parts, in the order in which they need each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.engine.arguments import OptimizerFactory
from paceline.engine.checks import check_loss_parameters, check_optimizer
from paceline.engine.context import StepContext
from paceline.engine.ema import AveragedWeights
from paceline.engine.freezing import Freezing
from paceline.engine.initial_weights import start_from_one_model, start_from_one_optimizer
from paceline.engine.internals import Internals
from paceline.engine.learning_rate import LearningRate, resolve_schedule
from paceline.engine.loss import LossFunction, LossModule
from paceline.engine.memory import MemoryMeter
from paceline.engine.microbatches import Microbatches
from paceline.engine.model_setup import ModelSetup
from paceline.engine.nonfinite import NonFiniteCheck
from paceline.engine.optimizer_groups import Groups
from paceline.engine.precision import Precision
from paceline.engine.randomness import SampleNumbers, make_randomness
from paceline.engine.rank_state import RankStates
from paceline.engine.same_batches import SameBatches
from paceline.engine.state import WholeState
from paceline.engine.whole_model import WholeModel
from paceline.layout import Layout
from paceline.options import EngineOptions
from paceline.parallel import sync_batchnorm
from paceline.parallel.apply_layout import needs_sample
from paceline.parallel.meta import is_on_meta
from paceline.sync.local_sgd import LocalSGD
from paceline.sync.protocol import Sync
from paceline.sync.replica import Replica
from paceline.sync.synchronous import SynchronousSGD
from paceline.world import World

# Ranks with different ones would not compute one step; most others would not even meet.
_SAME_ON_ALL_RANKS = (
    "precision",
    "loss_scaling",
    "clip_norm",
    "clip_value",
    "nonfinite",
    "sync_batchnorm",
    "freeze",
    "unfreeze_at",
    "initial_weights",
    "randomness",
    "ema",
)


def build(
    model: nn.Module,
    loss: LossFunction | None,
    optimizer: Optimizer | OptimizerFactory | None,
    options: EngineOptions,
    layout: Layout,
    world: World,
    freezing: Freezing,
) -> Internals:
    """Make what an engine consists of, and spread the model unless that needs a batch.

    A collective: all ranks start from one model and one optimizer.
    """
    precision = Precision(
        options.precision,
        world.device,
        sharded=bool(layout.beyond_dp),
        scaling=options.loss_scaling,
    )
    if options.sync_batchnorm:
        model = sync_batchnorm.convert(model)
    module = LossModule(model, loss, options.forward, options.count)
    check_loss_parameters(module)
    notes = start_from_one_model(
        module, world, initial_weights=options.initial_weights, settings=_shared(options, layout)
    )
    # Sharding and device maps move what they keep there; a sample runs where its batch is.
    sharded = layout.zero and not needs_sample(layout, options)
    if not is_on_meta(model) and not sharded and options.device_map is None:
        module.to(world.device)
    precision.prepare(module)
    replica = Replica(model, layout, world, randomness=make_randomness(options, world))
    optimizer = _made(optimizer, model, freezing)
    schedule = resolve_schedule(options.schedule, optimizer)
    start_from_one_optimizer(optimizer, model, world)
    groups = Groups(optimizer, model)
    microbatches = Microbatches(
        replica,
        module,
        precision,
        most=options.microbatch,
        pipelining=options.pipeline,
        numbers=SampleNumbers(replica, alone=options.local_steps is not None),
    )
    plain = SynchronousSGD(replica, options.compress, options.reduction)
    average = None if options.ema is None else AveragedWeights(options.ema, replica)
    setup = ModelSetup(
        replica,
        options,
        module,
        precision,
        optimizer,
        groups,
        microbatches,
        plain,
        average,
    )
    whole = WholeModel(model)
    if not setup.needs_batch:
        setup.apply_layout()
    context = StepContext(
        replica=replica,
        setup=setup,
        freezing=freezing,
        loss=module,
        precision=precision,
        optimizer=optimizer,
        groups=groups,
        learning_rate=LearningRate(optimizer, schedule),
        microbatches=microbatches,
        same_batches=SameBatches(layout, world),
        sync=_synchronising(plain, replica, precision, options),
        nonfinite=NonFiniteCheck(options.nonfinite, replica, module, precision),
        average=average,
        clip_norm=options.clip_norm,
        clip_value=options.clip_value,
    )
    meter = MemoryMeter(model, optimizer, world.device, average)
    state, rank_state = WholeState(context, whole), RankStates(context, whole)
    return Internals(context, state, rank_state, meter, notes)


def _shared(options: EngineOptions, layout: Layout) -> dict[str, Any]:
    """The settings that must be the same on all ranks."""
    shared = {name: options[name] for name in _SAME_ON_ALL_RANKS}
    return {"layout": str(layout)} | shared


class NoOptimizer(torch.optim.SGD):
    """Stands where no optimizer was given: it keeps no state, and changes nothing."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.0)


def _made(
    optimizer: Optimizer | OptimizerFactory | None, model: nn.Module, freezing: Freezing
) -> Optimizer:
    if optimizer is None:
        return NoOptimizer(model.parameters())
    if not isinstance(optimizer, Optimizer) and callable(optimizer):
        optimizer = optimizer(freezing.parameters())
    check_optimizer(optimizer, model)
    freezing.check_are_held([p for group in optimizer.param_groups for p in group["params"]])
    return optimizer


def _synchronising(
    plain: SynchronousSGD, replica: Replica, precision: Precision, options: EngineOptions
) -> Sync:
    """Plain, unless replicas are to train alone. Then a collective."""
    if options.local_steps is None:
        return plain
    nonfinite, scaler = options.nonfinite, precision.scaler
    return LocalSGD(options.local_steps, replica, plain, nonfinite=nonfinite, scaler=scaler)
