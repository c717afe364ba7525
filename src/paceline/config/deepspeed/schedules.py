"""DeepSpeed's learning-rate schedulers by their names, and what they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.config.deepspeed.keys import AUTO
from paceline.config.keys import nearest

_WARMUP = {
    "warmup_min_lr": 0.0,
    "warmup_max_lr": None,
    "warmup_num_steps": 1000,
    "warmup_type": "log",
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-3,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    },
    "OneCycle": {
        "cycle_min_lr": ...,
        "cycle_max_lr": ...,
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
    },
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": {"total_num_steps": ..., **_WARMUP, "warmup_max_lr": 0.001},
    "WarmupCosineLR": {
        "total_num_steps": ...,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    },
}
"""By name, what each takes with its default; ``...``: it must be given."""


@dataclass
class ScheduleChoice:
    """The class to use, as an import path, with its arguments, or the problems with them."""

    name: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    autos: list[str] = field(default_factory=list)


def choose_schedule(kind: str, params: Mapping[str, Any]) -> ScheduleChoice:
    """What ``{"type": kind, "params": params}`` asks for."""
    choice = ScheduleChoice()
    if kind not in SCHEDULES:
        near = nearest(kind, SCHEDULES)
        hint = f"did you mean {near!r}?" if near else f"it has {', '.join(SCHEDULES)}."
        choice.problems.append(f"scheduler.type={kind!r} is no scheduler of DeepSpeed's; {hint}")
        return choice
    takes = SCHEDULES[kind]
    choice.name = f"paceline.compat.deepspeed.schedules:{kind}"
    for name, value in params.items():
        if name == "last_batch_iteration":
            choice.problems.append(
                "scheduler.params.last_batch_iteration: where a run goes on is in its checkpoint. "
                "Leave it out."
            )
        elif name not in takes:
            near = nearest(name, takes)
            hint = f"did you mean {near!r}?" if near else f"{kind} takes {', '.join(takes)}."
            choice.problems.append(f"unknown key 'scheduler.params.{name}'; {hint}")
        elif value == AUTO:
            choice.autos.append(f"scheduler.params.{name}")
        else:
            choice.args[name] = value
    for name, default in takes.items():
        if default is ... and name not in params:
            choice.problems.append(f"scheduler.params.{name} is missing: {kind} needs it.")
    return choice
