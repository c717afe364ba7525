"""A small decoder-only transformer, plain enough to read at one sitting.

It is the model of the demo, the recipes and the benchmarks: pre-norm blocks, learned positions,
fused attention, output weights tied to the embedding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import TrainingError


class GPT(nn.Module):
    """``forward(tokens)`` maps ``(batch, time)`` token ids to ``(batch, time, vocab)`` logits."""

    def __init__(
        self,
        vocab_size: int = 256,
        context: int = 128,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        if width % heads:
            raise TrainingError(
                f"GPT: width={width} must be a multiple of heads={heads}: each head takes "
                "width/heads features."
            )
        self.context = context
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.apply(self._init_weights)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Logits for every position of ``tokens``, which may be at most ``context`` long.

        Several documents may share a sequence, as ``PackedTokens`` packs them: ``documents`` has
        the number of each token's document, to which alone it attends, and ``positions`` its place
        in it. Without them, a sequence is one document.
        """
        time = tokens.shape[1]
        if time > self.context:
            raise TrainingError(
                f"GPT: a sequence of {time} tokens is longer than context={self.context}. "
                "Cut the data to the model's context, or build the model with a longer one."
            )
        if positions is None:
            positions = torch.arange(time, device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        x = self.dropout(x)
        mask = None if documents is None else document_mask(documents)
        for block in self.blocks:
            x = block(x) if mask is None else block(x, mask)
        return self.head(self.norm(x))

    def _init_weights(self, module: nn.Module) -> None:
        """Values for one module; a model from the meta device gets them from here, too."""
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Linear):
            # Each block adds two terms to the residual stream: keep its variance near one.
            adds = isinstance(module, ResidualLinear)
            std = 0.02 / math.sqrt(2 * len(self.blocks)) if adds else 0.02
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()


class ResidualLinear(nn.Linear):
    """The last layer of a branch, whose output is added to the residual stream."""


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to its normalised input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width, dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """One residual block on ``(batch, time, width)``."""
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = ResidualLinear(width, width)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix the positions of ``(batch, time, width)``, each seeing only earlier ones.

        With a ``mask`` it sees what that says instead, of shape ``(batch, 1, time, time)``.
        """
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=rate
        )
        return self.residual_dropout(self.out(y.transpose(1, 2).reshape(batch, time, width)))


class MLP(nn.Module):
    """Widen by four, GELU, and back."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.out = ResidualLinear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """The perceptron on every position alone."""
        return self.dropout(self.out(F.gelu(self.up(x), approximate="tanh")))


def document_mask(documents: Tensor) -> Tensor:
    """Which tokens each token attends to: the earlier ones of its document, and itself."""
    time = documents.shape[1]
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril().view(-1, 1, time, time)


def token_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropy over the target tokens, and how many there are.

    Targets equal to -100 are padding: they neither add to the sum nor count.
    """
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()
