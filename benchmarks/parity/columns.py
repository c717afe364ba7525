"""The models of the parity matrix, each with its data, loss and optimizer, for ``verify``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from paceline.models import GPT
from paceline.models.gpt import token_cross_entropy
from paceline.testing.models import ResidualBlock, make_images, make_vectors

VOCABULARY = 29  # prime: split unevenly over any number of ranks
LENGTH = 8
SAMPLES = 40

COLUMNS = ("GPT", "MLP", "convnet", "GPT-2", "Llama", "Qwen3", "BERT")
SPECIAL = ("Llama-2kv", "Gemma-2", "Mixtral", "Encoder")
"""Hard to split: fewer key/value heads than ranks, tied weights over stages, experts in one tensor,
``nn.MultiheadAttention``."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def text() -> TensorDataset:
    """Sequences of which each has another number of targets that count."""
    tokens = torch.randint(
        VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    targets = tokens.roll(-1, 1)
    for index in range(SAMPLES):
        targets[index, 2 + index % (LENGTH - 2) :] = -100
    return TensorDataset(tokens, targets)


class Encodings(Dataset[dict[str, Tensor]]):
    """Padded text as a Hugging Face model takes it, labels included."""

    def __init__(self) -> None:
        self.tokens, self.labels = text().tensors

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = torch.ones_like(self.tokens[index])
        mask[LENGTH - index % 3 :] = 0
        labels = self.labels[index].masked_fill(mask == 0, -100)
        return {"input_ids": self.tokens[index], "attention_mask": mask, "labels": labels}


class Encoder(nn.Module):
    """torch's own transformer, with its dropout."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


class Perceptron(nn.Module):
    """Residual pairs of linear layers between an input and an output layer."""

    def __init__(self, inputs: int, width: int, outputs: int, blocks: int) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(blocks)
        )
        self.leave = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def convnet(blocks: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        *(ResidualBlock(4, 4) for _ in range(blocks)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 4),
    )


def hugging_face(name: str, blocks: int) -> nn.Module:
    """A config of its own, small, with the weights that the library draws."""
    import transformers as hf

    if name == "GPT-2":
        sizes = dict(n_positions=LENGTH, n_embd=32, n_layer=blocks, n_head=4)
        config = hf.GPT2Config(vocab_size=VOCABULARY, use_cache=False, **sizes)
        return hf.GPT2LMHeadModel(config)
    if name == "BERT":
        config = hf.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=blocks,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
        )
        return hf.BertForMaskedLM(config)
    shared = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    if name == "Llama":
        shared["num_attention_heads"] = 8
        return hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=4, **shared))
    if name == "Llama-2kv":
        return hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=2, **shared))
    if name == "Gemma-2":
        return hf.Gemma2ForCausalLM(
            hf.Gemma2Config(num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, **shared)
        )
    if name == "Mixtral":
        return hf.MixtralForCausalLM(
            hf.MixtralConfig(num_key_value_heads=4, num_local_experts=4, **shared)
        )
    if name == "Qwen2":
        return hf.Qwen2ForCausalLM(
            hf.Qwen2Config(num_key_value_heads=4, tie_word_embeddings=True, **shared)
        )
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(num_key_value_heads=2, head_dim=8, **shared))


def subject(name: str, blocks: int) -> dict[str, Any]:
    """The arguments of ``verify`` that say what to prove."""
    if name == "GPT":
        model: Any = functools.partial(
            GPT, VOCABULARY, context=LENGTH, layers=blocks, heads=4, width=32
        )
        return dict(model=model, loss=token_cross_entropy, data=text(), optimizer=adamw)
    if name == "Encoder":
        model = functools.partial(Encoder, blocks)
        return dict(model=model, loss=token_cross_entropy, data=text(), optimizer=adamw)
    if name == "MLP":
        model = functools.partial(Perceptron, 8, 16, 4, blocks)
        data: Any = make_vectors(SAMPLES)
        return dict(model=model, loss=nn.CrossEntropyLoss(), data=data, optimizer=adamw)
    if name == "convnet":
        model = functools.partial(convnet, blocks)
        data = make_images(SAMPLES, size=4)
        return dict(
            model=model,
            loss=nn.CrossEntropyLoss(),
            data=data,
            optimizer=adamw,
            sync_batchnorm=True,
        )
    model = functools.partial(hugging_face, name, blocks)
    return dict(model=model, data=Encodings(), optimizer=adamw)
