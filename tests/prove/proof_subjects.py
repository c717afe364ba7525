"""Models with their data, loss and optimizer, as a user would hand them to ``verify``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from paceline.models import GPT
from paceline.testing import make_images, make_mlp, make_resnet, make_vectors


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def token_loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return total, (target != -100).sum()


def padded_text(vocab: int = 13, length: int = 8) -> TensorDataset:
    """Sequences of which each has another number of targets that count."""
    tokens = torch.randint(vocab, (40, length), generator=torch.Generator().manual_seed(0))
    targets = tokens.clone()
    for index in range(len(targets)):
        targets[index, 1 + index % length :] = -100
    return TensorDataset(tokens, targets)


class Encodings(Dataset[dict[str, torch.Tensor]]):
    """Padded text as a Hugging Face model takes it, labels included."""

    def __init__(self) -> None:
        self.tokens, self.labels = padded_text().tensors

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.labels[index].clone()
        labels[1] = self.tokens[index, 1]  # at least one label counts
        return {
            "input_ids": self.tokens[index],
            "attention_mask": torch.ones_like(self.tokens[index]),
            "labels": labels,
        }


def gpt(dropout: float = 0.1) -> nn.Module:
    """Ties its output weights to the embedding, and drops out."""
    return GPT(vocab_size=13, context=8, layers=1, heads=2, width=8, dropout=dropout)


def certain_gpt() -> nn.Module:
    """The same without dropout: where a row differs, it need not be proved again without draws."""
    return gpt(dropout=0.0)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=13, n_positions=8, n_embd=8, n_layer=1, n_head=2, use_cache=False)
    )


def subject(name: str) -> dict[str, Any]:
    """The arguments of ``verify`` that say what to prove."""
    return {
        "mlp": dict(
            model=make_mlp(), loss=nn.CrossEntropyLoss(), data=make_vectors(40), optimizer=sgd
        ),
        "gpt": dict(model=gpt, loss=token_loss, data=padded_text(), optimizer=adamw),
        "certain-gpt": dict(
            model=certain_gpt, loss=token_loss, data=padded_text(), optimizer=adamw
        ),
        "gpt2": dict(model=gpt2, data=Encodings(), optimizer=adamw),
        "resnet": dict(
            model=lambda: make_resnet(4),
            loss=nn.CrossEntropyLoss(),
            data=make_images(40, size=4),
            optimizer=sgd,
            sync_batchnorm=True,
        ),
    }[name]
