"""Which options of spreading a model apply, and in what order: the one place that says so.

A device map, which is for one process alone, places the model before anything else. Then:

1. Pipeline: the model is cut into stages, and each rank keeps its own.
2. Tensor parallelism splits the layers of what is left.
3. Activation checkpointing goes around blocks, so that what they recompute is split already.
4. Blocks are compiled one by one, with what is inside them in place.
5. Data parallelism comes last, around everything: FSDP2 for ``zero``, DDP where the whole model is
   on every rank; else gradients are averaged over the copies after the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.errors import LayoutError
from paceline.layout import Layout
from paceline.options import EngineOptions
from paceline.options.rules import ZERO_BUBBLE, Combination, check_rules
from paceline.parallel.averaging import Averaging
from paceline.parallel.blocks import find_blocks
from paceline.parallel.device_map import place
from paceline.parallel.distributed_model import Context, DistributedModel, LossFirst, stage_group
from paceline.parallel.pipeline import Pipeline, cut
from paceline.parallel.recompute import recompute
from paceline.parallel.replicate import replicate
from paceline.parallel.shard import Sharded, shard
from paceline.parallel.shard.units import find_units
from paceline.parallel.tensor import (
    SplitForms,
    TensorPlan,
    apply_plan,
    common_plan,
    make_plan,
    mixing,
)
from paceline.world import World, collectives


def needs_sample(layout: Layout, options: EngineOptions) -> bool:
    """Whether spreading has to see a batch first: what to split is found by running the model."""
    return layout.tp > 1 or layout.pp > 1 or options.device_map == "auto"


def apply_layout(
    module: nn.Module,
    model: nn.Module,
    layout: Layout,
    world: World,
    options: EngineOptions,
    *,
    context: Context = contextlib.nullcontext,
    sample: Callable[[], Any] | None = None,
    materialise: Callable[[nn.Module], None] | None = None,
    averaging: Averaging | None = None,
) -> DistributedModel:
    """``module``, which computes the loss of ``model``, spread over the world as ``layout`` says.

    In place: parameters and modules keep their names. ``context`` is entered around each forward;
    ``sample`` runs ``module`` once on a batch like those to come; ``materialise`` gives values to
    a model without any; ``averaging`` averages gradients instead of DDP and FSDP. A collective.
    """
    check_rules(Combination(layout, options))
    pipeline, plan, forms = None, None, None
    entered = context
    devices = [world.device]
    if options.device_map is not None:
        run = None if sample is None else lambda _: sample()
        placed = place(model, options.device_map, sample=run, max_memory=options.max_memory)
        devices = placed.devices
    if layout.tp > 1:
        forms = SplitForms()
        entered = both(context, lambda: mixing(world.mesh(layout)["tp"], forms))
        plan = agreed_plan(lambda: _tensor_plan(model, layout, options, sample))
    # Before cutting: a pattern may name modules of which a stage holds none.
    units = find_units(model, options.sharding.units) if layout.zero else []
    if layout.pp > 1:
        pipeline = _cut(module, layout, world, options, entered, sample)
    if plan is not None:
        apply_plan(model, plan, world.mesh(layout)["tp"])
    if options.checkpoint_activations is not None:
        recompute(model, options.checkpoint_activations, context=entered)
    if options.compile:
        _compile(module, model, whole=layout == Layout(dp=layout.dp))
    called, sharded = module, []
    if layout.zero:
        called = module if pipeline is not None else LossFirst(module)
        roots = [called] if pipeline is None else list(pipeline.stages)
        sharded = [
            shard_root(root, model, layout, world, options, units, averaging) for root in roots
        ]
    if materialise is not None:
        for root in [model] if pipeline is None else pipeline.stages:
            materialise(root)
        if pipeline is not None:
            pipeline.copy_tied()
    if layout.zero == 0 and layout.dp > 1 and pipeline is None and layout.tp == 1:
        called = replicate(module, world.device, averaging, bucket_mib=options.reduction.static_mib)
    return DistributedModel(
        called,
        model,
        layout,
        world,
        pipeline=pipeline,
        sharded=sharded,
        context=entered,
        devices=devices,
        tensor_plan=plan,
        split_forms=forms,
        averaging=averaging,
        bucket_mib=options.reduction.static_mib,
    )


def _tensor_plan(
    model: nn.Module, layout: Layout, options: EngineOptions, sample: Callable[[], Any] | None
) -> TensorPlan:
    tensor = options.tensor
    return make_plan(
        model,
        layout.tp,
        sample=None if sample is None else lambda _: sample(),
        user=None if tensor.plan == "auto" else tensor.plan,
        sequence=tensor.sequence,
        vocabulary=tensor.vocabulary,
    )


def agreed_plan(make: Callable[[], TensorPlan]) -> TensorPlan:
    """The plan that all ranks made; a rank that could not make one fails on all. A collective."""
    plan, error = None, None
    try:
        plan = make()
    except Exception as raised:
        error = raised
    told = None if error is None else f"{type(error).__name__}: {error}"
    found: list[tuple[TensorPlan | None, str | None]] = collectives.all_gather_object((plan, told))
    if error is not None:
        raise error
    failed = {rank: text for rank, (_, text) in enumerate(found) if text is not None}
    if failed:
        rank, text = next(iter(failed.items()))
        raise LayoutError(
            f"rank {rank} could not make a tensor-parallel plan, so no rank can split the model: "
            f"{text}"
        )
    plans = [one for one, _ in found if one is not None]
    return common_plan(plans)


def both(first: Context, second: Context) -> Context:
    """``second`` inside ``first``."""

    @contextlib.contextmanager
    def entered() -> Any:
        with first(), second():
            yield

    return entered


def _cut(
    module: nn.Module,
    layout: Layout,
    world: World,
    options: EngineOptions,
    context: Context,
    sample: Callable[[], Any] | None,
) -> Pipeline:
    assert sample is not None
    plan = collectives.broadcast_object(cut(module, sample, layout.pp, options.pipeline))
    return Pipeline(
        module,
        plan,
        rank=layout.coordinate(world.rank).pp,
        pp=layout.pp,
        group=stage_group(world, layout).process_group,
        device=world.device,
        options=options.pipeline,
        context=context,
    )


def _compile(module: nn.Module, model: nn.Module, *, whole: bool) -> None:
    """Compile the model; or each block, and the loss, where parameters come and go around them."""
    blocks = [] if whole else find_blocks(model)
    for name in blocks:
        model.get_submodule(name).compile()
    if not blocks:
        model.compile()
        return
    loss = getattr(module, "loss", None)
    if isinstance(loss, nn.Module):
        loss.compile()
    elif loss is not None:  # a cross-entropy over a large vocabulary is dear when it is not fused
        setattr(module, "loss", torch.compile(loss))  # noqa: B010 (nn.Module's types)


def shard_root(
    root: nn.Module,
    model: nn.Module,
    layout: Layout,
    world: World,
    options: EngineOptions,
    units: Sequence[str] | None = None,
    averaging: Averaging | None = None,
) -> Sharded:
    """Shard ``root``, what is called with each microbatch, over the data-parallel ranks.

    ``units`` are the names, in ``model``, of what is gathered as a whole; those that another
    pipeline stage holds are left to it.
    """
    mesh = world.mesh(layout)
    if units is not None:
        held = set(root.modules())
        units = [name for name in units if model.get_submodule(name) in held]
    return shard(
        root,
        mesh["copies", "shards"] if layout.copies > 1 else mesh["shards"],
        stage=layout.zero,
        sharding=options.sharding,
        model=model,
        units=units,
        zero_bubble=layout.pp > 1 and options.pipeline.schedule in ZERO_BUBBLE,
        averaging=averaging,
    )
