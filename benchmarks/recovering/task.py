"""The same model, data and optimizer for all who take part; ranks note the steps they do."""

from __future__ import annotations

import os

import torch
from chaotic.work import NotingAdamW
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.models.gpt import GPT, token_cross_entropy

GLOBAL_BATCH = 16
STEPS = 1_000_000  # more than anybody gets to do
MODEL = {"vocab_size": 256, "context": 64, "layers": 2, "heads": 4, "width": 128, "dropout": 0.0}
LR = 1e-3
# Where a way to train keeps its checkpoints, and after how many steps it writes one.
FOLDER = "PACELINE_BENCH_FOLDER"
EVERY = "PACELINE_BENCH_EVERY"


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Random bytes: what is learned is no matter here."""

    def __init__(self, samples: int = 20_000) -> None:
        source = torch.Generator().manual_seed(1)
        size = (samples, MODEL["context"] + 1)
        self.tokens = torch.randint(256, size, generator=source, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.tokens[index].long()
        return row[:-1], row[1:]


def make_model() -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return GPT(**MODEL)


def make_optimizer(model: nn.Module) -> NotingAdamW:
    """AdamW that notes its steps."""
    return NotingAdamW(model.parameters(), lr=LR)


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The mean loss of a batch."""
    loss = token_cross_entropy(model(batch[0]), batch[1])
    total, count = loss if isinstance(loss, tuple) else (loss, 1)
    return total / count


def folder() -> str:
    """Where to keep checkpoints."""
    return os.environ[FOLDER]


def every() -> int:
    """After how many steps to write one."""
    return int(os.environ[EVERY])
