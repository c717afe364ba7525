"""What every way to train is given: the same model, text, order, optimizer and learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.data.text import ByteText, stdlib_source
from paceline.models.gpt import GPT, token_cross_entropy

Batch = tuple[Tensor, Tensor]
_VALIDATION_WINDOWS = 256


@dataclass(frozen=True)
class Task:
    """A byte GPT on the source of Python's standard library.

    ``decay`` is the number of steps over which the learning rate falls to a tenth by a cosine;
    ``None`` keeps it as it is after ``warmup`` steps.
    """

    layers: int
    heads: int
    width: int
    context: int
    global_batch: int
    lr: float
    clip_norm: float = 1.0
    warmup: int = 0
    decay: int | None = None
    seed: int = 0
    max_bytes: int | None = None

    def model(self) -> nn.Module:
        """The same weights on every rank."""
        torch.manual_seed(self.seed)
        return GPT(
            context=self.context,
            layers=self.layers,
            heads=self.heads,
            width=self.width,
            dropout=0.0,
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=self.lr, fused=True)

    def lr_factor(self, step: int) -> float:
        """What the learning rate is multiplied by in a step, from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.decay is None:
            return 1.0
        done = min(1.0, (step - self.warmup) / max(1, self.decay - self.warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    def batches(self, rank: int, size: int) -> Iterator[Batch]:
        """This rank's part of one global batch after the other, in an order drawn once."""
        text = self._text()[0]
        order = torch.randperm(len(text), generator=torch.Generator().manual_seed(self.seed))
        for step in range(len(order) // self.global_batch):
            share = order[step * self.global_batch : (step + 1) * self.global_batch][rank::size]
            yield _stacked([text[int(index)] for index in share])

    def validation(self, device: torch.device) -> Batch:
        """Some windows that are not trained on."""
        text = self._text()[1]
        windows = [text[index] for index in range(min(_VALIDATION_WINDOWS, len(text)))]
        inputs, targets = _stacked(windows)
        return inputs.to(device), targets.to(device)

    def _text(self) -> tuple[ByteText, ByteText]:
        return stdlib_source(self.context, max_bytes=self.max_bytes, val_fraction=0.01)


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    """What a hand-written loop minimises."""
    total, count = token_cross_entropy(output, target)
    return total / count


def _stacked(windows: list[Batch]) -> Batch:
    inputs, targets = zip(*windows, strict=True)
    return torch.stack(inputs), torch.stack(targets)
