"""What the disturbed runs train, and how each rank notes what it has done.

The loss notes which samples it is given, the optimizer writes them down with the number of the
step, one line a step and rank, in the file that the environment names. The number is the
optimizer's own, so it goes on after a resume where the saved state was.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

STEPS_FILE = "PACELINE_BENCH_STEPS"
PAUSE = "PACELINE_BENCH_PAUSE"
FEATURES = 32

_samples_of_this_step: list[int] = []


class Numbered(Dataset[tuple[Tensor, Tensor]]):
    """Random vectors, and for each a value to predict beside its number in the data."""

    def __init__(self, samples: int, double: bool = False) -> None:
        dtype = torch.float64 if double else torch.float32
        source = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(samples, FEATURES, generator=source, dtype=dtype)
        weights = torch.randn(FEATURES, generator=source, dtype=dtype)
        values = torch.sin(self.inputs @ weights)
        self.targets = torch.stack([values, torch.arange(samples, dtype=dtype)], dim=1)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Net(nn.Sequential):
    """A few layers with dropout, or without."""

    def __init__(self, width: int = 64, dropout: float = 0.1) -> None:
        super().__init__(
            *(nn.Linear(FEATURES, width), nn.GELU(), nn.Dropout(dropout)),
            *(nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout)),
            nn.Linear(width, 1),
        )


def noted_error(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared error; which samples it is of is noted on the way."""
    _samples_of_this_step.extend(int(number) for number in target[:, 1].tolist())
    return F.mse_loss(output[:, 0], target[:, 0])


class NotingAdamW(torch.optim.AdamW):
    """AdamW that writes a line for every step it has done, with the samples that went in."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step, a line, and a pause in place of real work, which more ranks share."""
        result = super().step(closure)
        first = self.param_groups[0]["params"][0]
        note_step(int(self.state[first]["step"]))
        time.sleep(float(os.environ.get(PAUSE, "0")) / int(os.environ.get("WORLD_SIZE", "1")))
        return result


def note_step(step: int) -> None:
    """Write the line of a step. One write, so that lines of several ranks do not mix."""
    line = {
        "time": time.time(),
        "step": step,
        "rank": int(os.environ.get("RANK", "0")),
        "size": int(os.environ.get("WORLD_SIZE", "1")),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        # Every start of the world has a store of its own.
        "start": f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        f":{os.environ.get('TORCHELASTIC_RESTART_COUNT')}",
        "samples": _samples_of_this_step[:],
    }
    _samples_of_this_step.clear()
    file = os.open(os.environ[STEPS_FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)
