"""A step that waits for no other replica: a step of a round of local steps."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from paceline.engine import nonfinite
from paceline.engine.checks import check_depends_on_parameters
from paceline.engine.microbatches import Sums
from paceline.engine.nonfinite import Problem
from paceline.engine.result import Numbers, StepResult

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.sync.local_sgd import Rounds


def step_alone(engine: Engine, rounds: Rounds, batch: Any, started: float) -> StepResult:
    """One optimizer step of this replica over its own share; its numbers are told to the others.

    A replica whose share is empty leaves its parameters alone.
    """
    pulse, skips = engine._pulse, engine.options["nonfinite"] == "skip"
    saved_buffers = engine._copy_buffers() if skips else {}
    parts = engine._passes.parts(batch)
    samples = engine._local.samples(batch)
    lr = engine._set_lr()
    sums = _accumulate(engine, parts, samples)
    pulse.enter("optimizer")
    norm = engine._finish_gradients(sums)
    numbers = Numbers(sums.local, norm)
    problem = None
    # On a GPU that goes on without waiting for the numbers, they are looked at when they are told.
    if engine.options["nonfinite"] != "ignore" and not engine._look_later:
        problem = _problem(engine, numbers, parts)
    if problem is not None and not problem.overflow:
        if skips:
            engine._leave_alone(saved_buffers)
    elif samples:
        engine._update()
    engine.optimizer.zero_grad(set_to_none=True)
    engine.steps_done += 1
    schedule = engine.options["schedule"]
    if isinstance(schedule, LRScheduler):
        schedule.step()
    late = rounds.finish_step(numbers, problem, sums.local[1])
    pulse.finish_step(engine.steps_done)
    pulse.enter("data")
    seconds = time.perf_counter() - started
    return StepResult(step=engine.steps_done, lr=lr, seconds=seconds, _numbers=late)


def _accumulate(engine: Engine, parts: list[tuple[Any, int]], samples: int) -> Sums:
    """As :meth:`Passes.accumulate`, by this replica's own count, and without a message."""
    local = torch.zeros(3, dtype=torch.float64, device=engine.device)
    local[2].fill_(samples)
    divisor = local[1].clone()
    scaler = engine._precision.scaler
    for index, (part, items) in enumerate(parts):
        with engine.spread.reducing(last=False, counts=items > 0):
            engine._pulse.enter("forward")
            term = engine.spread(part, items)
            check_depends_on_parameters(term.total)
            local[0] += term.total.detach().to(engine.device)
            count = term.count
            local[1] += count.to(engine.device) if isinstance(count, torch.Tensor) else count
            if index == 0:
                divisor = _not_zero(local[1], torch.ones_like(local[1]))
            loss = term.total * (1 / divisor).to(term.total)
            engine._pulse.enter("backward")
            (loss if scaler is None else scaler.scale(loss)).backward()
    counted = local.clone()
    counted[1] = _not_zero(local[1], divisor)
    return Sums(local=local, world=counted, divisor=divisor)


def _not_zero(count: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """``count``, or where the loss counted nothing but padding something to divide by."""
    return torch.where(count == 0, otherwise, count)


def _problem(engine: Engine, numbers: Numbers, parts: list[tuple[Any, int]]) -> Problem | None:
    """What is not finite in this replica's step, if anything."""
    total, _, _, *norm = numbers.read()
    if math.isfinite(total) and all(map(math.isfinite, norm)):
        return None
    if math.isfinite(total) and engine._precision.scaler is not None:
        return Problem("gradients", "fp16 gradients overflowed", overflow=True)
    rank = engine.world.rank
    return nonfinite.locate_alone(engine._local, parts, engine._precision, total, rank)
