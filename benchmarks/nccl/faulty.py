"""What the disturbed run trains: an optimizer in whose steps planned faults happen."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

PLAN = "PACELINE_BENCH_FAULTS"
"""In the environment: the faults, in their order, as JSON. One happens in each start of the run."""
SLOW = "PACELINE_BENCH_SLOW"
"""In the environment: while this file exists, reading a sample takes a while."""
KINDS = ("kill", "stop", "loop", "out of memory", "raise", "exit")
FEATURES = 64


class Vectors(Dataset[tuple[Tensor, Tensor]]):
    """Random vectors, and for each a class."""

    def __init__(self, samples: int = 512) -> None:
        draw = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(samples, FEATURES, generator=draw)
        self.targets = torch.randint(0, 8, (samples,), generator=draw)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if os.path.exists(os.environ.get(SLOW, "")):
            time.sleep(0.02)
        return self.inputs[index], self.targets[index]


class Net(nn.Sequential):
    """A few layers."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Linear(FEATURES, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU()),
            nn.Linear(128, 8),
        )


class FaultyAdamW(torch.optim.AdamW):
    """AdamW in whose steps faults happen; its peers then wait for this rank in a collective."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        first = self.param_groups[0]["params"][0]
        _reach(int(self.state[first]["step"]), first.device)
        return result


def _reach(step: int, device: torch.device) -> None:
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    plan = json.loads(os.environ.get(PLAN, "[]"))
    if attempt >= len(plan):
        return
    fault = plan[attempt]
    if (int(os.environ["RANK"]), step) == (fault["rank"], fault["step"]):
        happen(fault["kind"], device)


def happen(kind: str, device: torch.device) -> None:
    """One fault on this rank."""
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "loop":
        total = 0
        while True:
            total += 1
    elif kind == "out of memory":
        if device.type == "cpu":
            raise torch.OutOfMemoryError("CUDA out of memory, as planned")
        torch.empty(2**45, dtype=torch.uint8, device=device)
    elif kind == "raise":
        raise RuntimeError("a fault as planned")
    elif kind == "exit":
        os._exit(3)
    else:
        raise ValueError(f"no such fault: {kind!r}")
