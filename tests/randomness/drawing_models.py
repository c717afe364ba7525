"""Models that draw in their forward pass, and runs of them on any layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline import Layout
from paceline.data import share
from paceline.models.gpt import GPT, token_cross_entropy

SAMPLES = 7  # shares of it are uneven on any number of ranks
RATE = 0.1


class ConvNet(nn.Module):
    """Convolutions with dropped channels, stochastic depth, noise and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock() for _ in range(3))
        self.dropout = nn.Dropout(RATE)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = x + 0.1 * torch.randn_like(x)
        return self.head(self.dropout(x.mean(dim=(2, 3))))


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.channels = nn.Dropout2d(RATE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.channels(F.relu(self.conv(x)))
        kept = torch.rand(x.shape[0], 1, 1, 1, device=x.device) > RATE
        return x + y * kept / (1 - RATE)


def make_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=33, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=32, max_position_embeddings=16,
        hidden_dropout_prob=RATE, attention_probs_dropout_prob=RATE,
    )  # fmt: skip
    return BertForMaskedLM(config)


def make(kind: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    if kind == "gpt":
        return GPT(33, context=8, layers=3, heads=4, width=16, dropout=RATE), token_cross_entropy
    if kind == "bert":
        return make_bert(), None
    return ConvNet(), nn.CrossEntropyLoss()


def batch(kind: str, step: int) -> Any:
    draw = torch.Generator().manual_seed(step)
    if kind == "conv":
        images = torch.randn(SAMPLES, 3, 6, 6, generator=draw)
        return images, torch.randint(0, 5, (SAMPLES,), generator=draw)
    text = torch.randint(0, 33, (SAMPLES, 9), generator=draw)
    if kind == "bert":
        return {"input_ids": text, "labels": text.roll(1, 1)}
    return text[:, :-1], text[:, 1:]


def share_of(whole: Any, layout: Layout) -> Any:
    start, stop = share(SAMPLES, layout.coordinate(paceline.World.current().rank).dp, layout.dp)
    if isinstance(whole, dict):
        return {name: value[start:stop] for name, value in whole.items()}
    return tuple(value[start:stop] for value in whole)


def train(
    kind: str, layout: str, *, steps: int = 2, state: Any = None, **options: Any
) -> tuple[list[float], dict[str, Any]]:
    """Losses and the state after ``steps``; a generator of this rank's own must not matter."""
    model, loss = make(kind)
    engine = paceline.Engine(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss=loss,
        layout=layout,
        precision="fp64",
        **{"randomness": "strict", **options},
    )
    if state is not None:
        engine.load_state_dict(state)
    torch.manual_seed(100 + paceline.World.current().rank)
    numbers = range(engine.steps_done, engine.steps_done + steps)
    losses = [engine.step(share_of(batch(kind, n), engine.layout)).loss for n in numbers]
    return losses, engine.state_dict()


def train_all(runs: list[tuple[str, str, dict[str, Any]]]) -> list[Any]:
    """Every run after the other: its losses and the whole model."""
    done = [train(kind, layout, **options) for kind, layout, options in runs]
    return [(losses, state["model"]) for losses, state in done]
