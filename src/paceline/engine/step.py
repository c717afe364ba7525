"""One optimizer step, from a batch to updated parameters: any layout, any way of synchronising.

Read on in ``microbatches.py`` (how gradients of microbatches add up), ``sync/synchronous.py`` (how
ranks agree; DDP and FSDP themselves are in ``parallel/``) and ``gradients.py`` (norm, clipping).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.engine.context import StepContext
from paceline.engine.gradients import Gradients
from paceline.engine.microbatches import Sums
from paceline.engine.result import StepResult
from paceline.sync.numbers import Numbers
from paceline.sync.protocol import StepSync


def run_step(context: StepContext, batch: Any) -> StepResult:
    """One optimizer step over the global batch of which ``batch`` is this rank's share.

    Every rank calls it.
    """
    started = time.perf_counter()
    replica, pulse = context.replica, context.replica.pulse
    pulse.enter("forward")
    context.same_batches.check(batch)
    if not replica.is_spread:
        context.setup.apply_layout(batch)
    if context.clock is not None:
        wait_for_late_ranks(context)
    context.groups.follow(context.optimizer, replica.held, replica.model)
    context.freezing.follow(replica.held, replica.steps_done)
    frozen_changed = replica.follow_freezing()
    if frozen_changed:
        context.sync.follow_freezing()
    if context.average is not None:
        context.average.check_not_in_place("step")
        context.average.before_update(frozen_changed=frozen_changed)
    for parameter in replica.parameters:
        parameter.grad = None  # what a step that failed, or another backward, left there

    sync = context.sync.begin_step()
    logs = context.microbatches.logs
    if not sync.alone:
        logs.begin()
    saved_buffers = copy_buffers(replica.model) if context.nonfinite.policy == "skip" else {}
    parts = context.microbatches.of_step(batch)
    samples = context.loss.samples(batch)
    lr = context.learning_rate.set(replica.steps_done)
    try:
        sums = context.microbatches.accumulate_gradients(parts, samples, sync, context.clock)
    except BaseException:
        replica.spread.reset()
        raise

    pulse.enter("optimizer")
    norm = finish_gradients(context, sync, sums)
    numbers = Numbers(sums.world, norm, sums.logged)
    problem = context.nonfinite.check(numbers, sums.local, parts, sync)
    applied = False
    if problem is None or problem.overflow:
        applied = sync.updates(samples) and update(context, sync)
    elif context.nonfinite.policy == "skip":
        leave_alone(context, saved_buffers)
    sync.commit(applied=applied)
    context.optimizer.zero_grad(set_to_none=True)

    replica.steps_done += 1
    if context.average is not None:
        context.average.after_update()
    context.learning_rate.step_done()
    context.nonfinite.look_at_step_before()
    logs.settle()  # of the step before, on a GPU: its numbers have arrived
    log = None if sums.logged is None else logs.end(list(sums.keys), numbers.logged)
    reported = sync.end_step(numbers, problem, sums.local[1])
    pulse.finish_step(replica.steps_done)
    pulse.enter("data")  # what comes between steps: a trainer tells more of it
    seconds = time.perf_counter() - started
    return StepResult(step=replica.steps_done, lr=lr, seconds=seconds, _numbers=reported, _log=log)


def finish_gradients(context: StepContext, sync: StepSync, sums: Sums) -> Tensor | None:
    """Turn the accumulated gradients into the gradient of the mean, clip it, give its norm."""
    sync.finish()
    replica, scaler = context.replica, context.precision.scaler
    if scaler is not None:
        scaler.unscale_(context.optimizer)
    counts = None if replica.spread.is_plain else replica.spread.counts_in_norm
    updated = (p for group in context.optimizer.param_groups for p in group["params"])
    gradients = Gradients(updated, counts, replica.device)
    if context.microbatches.accumulate:
        factor = sums.factor
        if replica.device.type != "cpu" or factor != 1:  # on a GPU, looking would be waiting
            gradients.scale(factor)
    if context.observer is not None:
        context.observer()
    norm = None
    if context.clip_norm is not None or context.nonfinite.policy != "ignore":
        norm = gradients.norm()
    if context.clip_norm is not None:
        assert norm is not None
        gradients.clip_norm(context.clip_norm, norm)
    if context.clip_value is not None:
        gradients.clip_values(context.clip_value)
    return norm


def update(context: StepContext, sync: StepSync) -> bool:
    """Change the parameters; whether that was done."""
    scaler = context.precision.scaler
    if scaler is None:
        context.optimizer.step()
        return True
    before = scaler.get_scale() if sync.must_know_if_applied else 0.0
    scaler.step(context.optimizer)  # does nothing where the gradients overflowed
    scaler.update()
    # As torch documents it: the scale goes down if and only if the step was left out.
    return not sync.must_know_if_applied or scaler.get_scale() >= before


def copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers as they are before a step that may be left out."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def leave_alone(context: StepContext, saved_buffers: Mapping[str, Tensor]) -> None:
    """Undo what the forward of a skipped step did; the parameters are unchanged."""
    if context.precision.scaler is not None:
        context.precision.scaler.update()
    with torch.no_grad():
        for name, buffer in context.replica.model.named_buffers():
            buffer.copy_(saved_buffers[name])


def wait_for_late_ranks(context: StepContext) -> None:
    """Wait for ranks that come late to a step whose time is split up.

    Tensor-parallel ranks would wait inside the forward pass, where it looks like work; with
    other layouts they meet before, or after it, anyway.
    """
    replica = context.replica
    if replica.layout.tp > 1 and replica.layout.pp == 1:
        with replica.pulse.during("waiting"):
            dist.all_reduce(torch.zeros(1), group=replica.world.everyone.cpu_group)
