"""How long calls take: how often to make them, and the clock around them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.bench.operations import Operation
from paceline.world.group import Group

_SAMPLE_SECONDS = 0.05
_MOST_CALLS = 20
_MOST_SAMPLES = 100
_CALIBRATION_CALLS = 3


@dataclass(frozen=True)
class TimingPlan:
    """``samples`` measurements, each over ``calls`` calls in a row."""

    calls: int
    samples: int


def make_plan(one_call: float, seconds: float) -> TimingPlan:
    """How to spend about ``seconds`` on calls that take ``one_call`` each.

    Ranks leave the barrier before a sample at different moments, by up to the latency of a link.
    Short calls are therefore measured several in a row.
    """
    calls = min(max(round(_SAMPLE_SECONDS / max(one_call, 1e-9)), 1), _MOST_CALLS)
    samples = min(max(int(seconds / max(calls * one_call, 1e-9)), 1), _MOST_SAMPLES)
    return TimingPlan(calls, samples)


def measure(
    operation: Operation, members: Group, seconds: float, device: torch.device
) -> tuple[TimingPlan, list[float]]:
    """The plan, equal on all members, and this rank's seconds for each sample. A collective."""
    one_call = _agreed(_timed(operation, members, 1, device), members)  # warms up, too
    if one_call < seconds:
        again = _timed(operation, members, _CALIBRATION_CALLS, device) / _CALIBRATION_CALLS
        one_call = _agreed(again, members)
    plan = make_plan(one_call, seconds)
    return plan, [_timed(operation, members, plan.calls, device) for _ in range(plan.samples)]


def time_once(operation: Operation, members: Group, device: torch.device) -> float:
    """This rank's seconds for a single call that has been warmed up. A collective."""
    _timed(operation, members, 1, device)
    return _timed(operation, members, 1, device)


def _timed(operation: Operation, members: Group, calls: int, device: torch.device) -> float:
    dist.barrier(members.cpu_group)
    begin = time.perf_counter()
    for i in range(calls):
        operation.call(i)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _agreed(seconds: float, members: Group) -> float:
    """The longest time of any member, which then all of them plan with."""
    longest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=members.cpu_group)
    return float(longest)
