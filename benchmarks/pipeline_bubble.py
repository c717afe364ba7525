"""The bubble of each pipeline schedule, measured on real ranks beside the schedule's own figure.

Each rank runs torch's schedule over Gloo on stages that sleep: a forward one unit, a backward two,
one for the gradient of the input and one for that of the weights. The share of the step a rank is
not asleep is its bubble; the fastest of some steps counts. Also counted: the forwards whose
backward a rank still owes.

    python benchmarks/pipeline_bubble.py [--ranks 4] [--microbatches 8] [--unit-ms 120]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from paceline.layout.pipeline_schedules import SCHEDULES, Costs, Schedule, build_schedule, placement
from paceline.testing import RankPool

RESULTS = Path(__file__).parent / "results" / "pipeline_bubble.json"
TORCH = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}


class Clock:
    """How long this rank slept, and how many microbatches it holds."""

    slept = 0.0
    live = 0
    most_live = 0

    def sleep(self, seconds: float) -> None:
        started = time.monotonic()
        time.sleep(seconds)
        self.slept += time.monotonic() - started


class Nap(torch.autograd.Function):
    """Hands its input on; sleeps when the gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, seconds: float, done: int) -> Tensor:
        ctx.clock, ctx.seconds, ctx.done = clock, seconds, done
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.clock.sleep(ctx.seconds)
        ctx.clock.live -= ctx.done
        return grads[0], None, None, None


class SleepyStage(nn.Module):
    """Input and weight meet in a product, so that torch can ask for their gradients apart.

    The first stage's input needs no gradient: all its backward is the weight's.
    """

    def __init__(self, clock: Clock, unit: float, first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.clock, self.unit, self.first = clock, unit, first

    def forward(self, x: Tensor) -> Tensor:
        self.clock.sleep(self.unit)
        self.clock.live += 1
        self.clock.most_live = max(self.clock.most_live, self.clock.live)
        weight = Nap.apply(self.weight, self.clock, self.unit * (2 if self.first else 1), 1)
        return (x if self.first else Nap.apply(x, self.clock, self.unit, 0)) * weight


def costs(stages: int, unit: float) -> Costs:
    """What the sleepy stages cost, as torch runs them."""
    return Costs(
        forward=unit,
        backward=2 * unit,
        input_grad=[0.0] + [unit] * (stages - 1),
        weight_grad=[2 * unit] + [unit] * (stages - 1),
    )


def rank_job(name: str, microbatches: int, stages: int, unit: float, steps: int) -> dict[str, Any]:
    """Runs on every rank: when each step began and ended, how long it slept, what it held."""
    rank, pp = dist.get_rank(), dist.get_world_size()
    clock = Clock()
    held = [
        PipelineStage(SleepyStage(clock, unit, index == 0), index, stages, torch.device("cpu"))
        for index in placement(name, pp, stages // pp)[rank]
    ]
    kind: Any = TORCH[name]
    single = name in ("gpipe", "1f1b")
    schedule = kind(held[0] if single else held, microbatches, loss_fn=lambda y, t: y.sum())
    batch = torch.ones(microbatches, 4)
    times = []
    for step in range(steps + 1):
        clock.live = clock.most_live = 0
        dist.barrier()
        clock.slept = 0.0
        started = time.monotonic()
        inputs = (batch,) if rank == 0 else ()
        schedule.step(*inputs, target=batch)
        if step:  # the first finds out shapes
            times.append((started, time.monotonic(), clock.slept))
    return {"times": times, "most_live": clock.most_live}


def measure(pool: RankPool, plan: Schedule, unit: float, steps: int) -> dict[str, Any]:
    ranks = pool.run(
        rank_job,
        plan.name,
        plan.microbatches,
        plan.stages,
        unit,
        steps,
        world_size=plan.pp,
        timeout=300,
    )
    seconds, bubbles = [], []
    for step in range(steps):
        begun, ended, slept = zip(*(rank["times"][step] for rank in ranks), strict=True)
        seconds.append(max(ended) - min(begun))
        bubbles.append(1 - sum(slept) / plan.pp / seconds[-1])
    # The fastest step: whatever else the machine does can only make ranks wait longer.
    fastest = seconds.index(min(seconds))
    return {
        "seconds": seconds[fastest],
        "bubble": bubbles[fastest],
        "most_live": [rank["most_live"] for rank in ranks],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--unit-ms", type=float, default=120.0)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    unit = options.unit_ms / 1000
    print(
        f"{'schedule':26}{'step s':>9}{'planned':>9}{'bubble':>9}{'planned':>9}{'ratio':>7}  "
        "most live by rank (planned)"
    )
    rows = {}
    with RankPool() as pool:
        for name in SCHEDULES:
            stages = options.ranks * (1 if name in ("gpipe", "1f1b") else 2)
            plan = build_schedule(
                name,
                options.ranks,
                options.microbatches,
                stages // options.ranks,
                costs(stages, unit),
            )
            row = measure(pool, plan, unit, options.steps)
            row |= {"planned_seconds": plan.makespan, "planned_bubble": plan.bubble}
            row |= {"planned_live": plan.most_live, "ratio": row["bubble"] / plan.bubble}
            rows[name] = row
            print(
                f"{name:26}{row['seconds']:>9.3f}{plan.makespan:>9.3f}{row['bubble']:>9.1%}"
                f"{plan.bubble:>9.1%}{row['ratio']:>7.2f}  {row['most_live']} ({plan.most_live})",
                flush=True,
            )
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"options": vars(options), "schedules": rows}, indent=2) + "\n")
    print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
