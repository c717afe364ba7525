"""What is not in the rows of docs/parity.md: unusual models, precisions and ways to communicate.

Each case trains for a few steps. Where nothing is lost on the wire, losses and parameters must be
those of one process; else those of the same layout on CPU ranks over Gloo.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.models import GPT, token_cross_entropy

STEPS = 4


@dataclass(frozen=True)
class Feature:
    """A layout with something unusual about the model, the batch or the options."""

    layout: str
    model: str = "gpt"
    samples: int = 8
    precision: str = "fp64"
    tolerance: float = 1e-9
    lossy: bool = False
    """Compared with CPU ranks on the same layout, not with one process."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """How many it takes."""
        return paceline.Layout.parse(self.layout).world_size

    def __str__(self) -> str:
        told = [] if self.model == "gpt" else [self.model]
        told += [] if self.samples == 8 else [f"{self.samples} samples"]
        told += [] if self.precision == "fp64" else [self.precision]
        told += [f"{name}={_short(value)}" for name, value in self.options.items()]
        return ", ".join([self.layout, *told])


def _short(value: Any) -> str:
    if isinstance(value, paceline.Compression):
        return value.format
    if isinstance(value, paceline.LocalSteps):
        return f"every {value.every}, {value.method}, overlap {value.overlap}, {value.exchange}"
    if isinstance(value, paceline.Reduction):
        return f"hierarchy {value.hierarchy}"
    return f"offload {value.offload}" if isinstance(value, paceline.Sharding) else str(value)


class PartlyFrozen(nn.Module):
    """A model whose first half is frozen, so that a stage or a shard may have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)])
        self.head = nn.Linear(32, 4)
        self.layers[:2].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class DrawingConvNet(nn.Module):
    """Convolutions with dropped channels, stochastic depth, noise and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.channels, self.dropout = nn.Dropout2d(0.1), nn.Dropout(0.1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.view(-1, 2, 4, 4))
        for layer in self.layers:
            kept = torch.rand(len(x), 1, 1, 1, device=x.device) > 0.1
            x = x + kept * self.channels(torch.tanh(layer(x)))
        x = x + 0.1 * torch.randn_like(x)
        return self.head(self.dropout(x.mean(dim=(2, 3))))


def _build(kind: str) -> tuple[nn.Module, Any]:
    if kind == "partly frozen":
        return PartlyFrozen(), F.cross_entropy
    if kind == "convnet that draws":
        return DrawingConvNet(), F.cross_entropy
    model = {"vocab_size": 64, "context": 16, "layers": 4, "heads": 4, "width": 32}
    if kind == "dropout":
        return GPT(**model, dropout=0.1), token_cross_entropy
    if kind == "meta":
        with torch.device("meta"):
            return GPT(**model), token_cross_entropy
    return GPT(**model), token_cross_entropy


def _batches(feature: Feature) -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    size = feature.samples
    if feature.model not in ("partly frozen", "convnet that draws"):
        tokens = [torch.randint(0, 64, (size, 17), generator=draw) for _ in range(STEPS)]
        return [(t[:, :-1], t[:, 1:]) for t in tokens]
    dtype = torch.float64 if feature.precision == "fp64" else torch.float32
    inputs = [torch.randn(size, 32, generator=draw, dtype=torch.float64) for _ in range(STEPS)]
    return [(x.to(dtype), torch.randint(0, 4, (size,), generator=draw)) for x in inputs]


def train(feature: Feature, layout: str | None = None) -> list[float]:
    """Losses, and in the end the sum of the absolute values of all parameters.

    Every rank builds its model from another seed: all layouts must train rank 0's.
    """
    chosen = paceline.Layout.parse(layout or feature.layout)
    world = paceline.World.current()
    torch.manual_seed(0 if feature.model == "meta" else world.rank)
    model, loss = _build(feature.model)
    options: dict[str, Any] = {"microbatch": 2, "clip_norm": 1.0, **feature.options}
    if layout is not None:  # one process, which spreads nothing
        options = {k: v for k, v in options.items() if k in ("microbatch", "clip_norm")}
    engine = paceline.Engine(
        model,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        layout=chosen,
        precision=feature.precision,
        **options,
    )
    place = chosen.coordinate(world.rank)
    losses = []
    for inputs, targets in _batches(feature):
        start, stop = paceline.data.share(len(inputs), place.dp, chosen.dp)
        losses.append(engine.step((inputs[start:stop], targets[start:stop])).loss)
    engine.settle()
    engine.meet()
    state = engine.state_dict()["model"]
    return [*losses, sum(float(value.double().abs().sum()) for value in state.values())]


def difference(found: list[list[float]], expected: list[float]) -> float:
    """The largest relative difference that any rank has."""
    return max(
        abs(a - b) / max(abs(b), 1e-12)
        for values in found
        for a, b in zip(values, expected, strict=True)
    )


def _compressed(form: str, layout: str = "dp=2", tolerance: float = 1e-6) -> Feature:
    compress = paceline.Compression(form, warmup_steps=0, smallest=1)
    return Feature(layout, lossy=True, tolerance=tolerance, options={"compress": compress})


def _local(**options: Any) -> Feature:
    exchange = options.get("exchange")
    tolerance = 1e-9 if exchange in (None, "none") else 1e-6
    steps = paceline.LocalSteps(**options)
    return Feature("dp=2", lossy=True, tolerance=tolerance, options={"local_steps": steps})


FEATURES = [
    # Ranks that see no sample, or hold no parameter that has a gradient.
    Feature("dp=4", samples=3),
    Feature("dp=4,zero=3", samples=3),
    Feature("dp=2,zero=3", "partly frozen"),
    Feature("pp=2", "partly frozen"),
    Feature("dp=2,pp=2", "partly frozen"),
    Feature("dp=2,zero=1,pp=2", "partly frozen"),
    Feature("pp=2", "partly frozen", precision="fp16", tolerance=5e-2),
    Feature("dp=2,zero=3", "partly frozen", precision="fp16", tolerance=5e-2),
    Feature("dp=3"),
    Feature("dp=2,zero=3", options={"checkpoint_activations": "full"}),
    Feature("tp=2", options={"checkpoint_activations": "selective"}),
    Feature("dp=2,pp=2", options={"checkpoint_activations": "full"}),
    Feature("dp=2,zero=3", options={"sharding": paceline.Sharding(offload="parameters")}),
    Feature("dp=2,zero=3", options={"sharding": paceline.Sharding(offload="optimizer")}),
    Feature("dp=2,zero=3", "meta"),
    Feature("dp=2,zero=3,tp=2", "meta"),
    Feature("pp=2", "meta"),
    # Draws in the forward pass: those of one process, which is on the CPU.
    *(
        Feature(layout, "dropout")
        for layout in ("dp=2", "dp=2,zero=3", "tp=2", "pp=2", "dp=2,tp=2")
    ),
    Feature("dp=2,zero=3", "dropout", options={"checkpoint_activations": "full"}),
    Feature("tp=2,pp=2", "dropout", options={"checkpoint_activations": "full"}),
    Feature("dp=3", "convnet that draws"),
    Feature("dp=2,zero=3", "convnet that draws"),
    Feature("dp=4", options={"reduction": paceline.Reduction(hierarchy="always")}),
    *map(_compressed, ("fp16", "bf16", "int8", "sign", "topk:0.1", "randomk:0.1")),
    _compressed("powersgd:2"),
    _compressed("powersgd:2+bf16"),
    _compressed("int8", "dp=3"),
    _compressed("int8", "dp=2,zero=2"),
    _compressed("topk:0.1", "dp=2,tp=2"),
    _compressed("topk:0.1", "dp=2,pp=2"),
    _local(every=2, method="average"),
    _local(every=2),
    _local(every=2, fragments=2, overlap=1),
    _local(every=2, overlap=1, exchange="int8"),
]
