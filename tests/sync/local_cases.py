"""Models, data and simulations for the tests of local steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import paceline

STEPS = 12
EXACT = {"rtol": 0.0, "atol": 1e-12}


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 3)).double()


def samples(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g, dtype=torch.float64)
    return x, torch.randint(0, 3, (n,), generator=g)


def share_of(batch: Any, rank: int, size: int) -> Any:
    start, stop = paceline.data.share(len(batch[0]), rank, size)
    return tuple(t[start:stop] for t in batch)


def my_share(step: int, n: int = 7) -> Any:
    world = paceline.World.current()
    return share_of(samples(n, 100 + step), world.rank, world.size)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def make_engine(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd, **options: Any
) -> paceline.Engine:
    model = net()
    return paceline.Engine(model, loss=F.cross_entropy, optimizer=optimizer(model), **options)


def weights(engine: paceline.Engine) -> list[torch.Tensor]:
    return [p.detach().clone() for p in engine.model.parameters()]


CASES = {
    "average": paceline.LocalSteps(every=4, method="average"),
    "diloco": paceline.LocalSteps(every=4),
    "fragments": paceline.LocalSteps(every=4, fragments=2),
    "uneven fragments": paceline.LocalSteps(every=4, fragments=3, outer_lr=0.5),
    "overlap": paceline.LocalSteps(every=4, overlap=2),
    "fragments and overlap": paceline.LocalSteps(every=4, fragments=2, overlap=3),
    "average in fragments": paceline.LocalSteps(every=3, method="average", fragments=3, overlap=2),
}


RESUMED = {
    **CASES,
    "quantised": paceline.LocalSteps(every=3, exchange="int8", fragments=2, overlap=2),
    "post-local": paceline.LocalSteps(every=3, start=4),
}


class Wide(nn.Module):
    """Large enough that an exchange in int8 really is one (small tensors travel as they are)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(4, 260), nn.BatchNorm1d(260), nn.Tanh(), nn.Linear(260, 3)
        ).double()

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def wide_engine(options: paceline.LocalSteps, **more: Any) -> paceline.Engine:
    model = Wide()
    return paceline.Engine(
        model, loss=F.cross_entropy, optimizer=adam(model), local_steps=options, **more
    )


def everything(engine: paceline.Engine) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in engine.model.state_dict().items()}


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
