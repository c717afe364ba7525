"""Models, data and a plain loop on one process to hold sharded modules against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from paceline.engine.precision import Precision

SAMPLES, PARTS, STEPS = 12, 3, 3
CLIP = 0.1
VOCABULARY = 19
DOUBLE = Precision("fp64", torch.device("cpu"))


class Loss(nn.Module):
    """A model and its loss as one module, as the engine wraps them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any, items: int = 0) -> Any:
        from paceline.parallel.loss_term import Term

        inputs, targets = batch
        output = self.model(inputs)
        logits = getattr(output, "logits", output)
        total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
        return Term(total, targets.numel(), output)


class Odd(nn.Module):
    """A scalar parameter, one nobody uses, a frozen one, and dimensions that divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 7)
        self.layers = nn.ModuleList(OddBlock() for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(7, 5)
        self.head = nn.Linear(7, VOCABULARY)
        self.embed.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.temperature


class OddBlock(nn.Module):
    """Frozen and trained parameters in one unit; the gate opens for some samples alone."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(7, 7)
        self.trained = nn.Linear(7, 7)
        self.gated = nn.Linear(7, 7, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.trained(self.frozen(x))) * self.gain
        if bool(x[0, 0, 0] > 0.5):
            y = y + self.gated(x)
        return x + y


def gpt() -> nn.Module:
    from paceline.models import GPT

    return GPT(vocab_size=VOCABULARY, context=8, layers=2, heads=2, width=16)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 7),
        nn.Linear(7, 13),
        nn.ReLU(inplace=True),
        nn.Linear(13, VOCABULARY),
    )


def lstm() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, 7)
            self.lstm = nn.LSTM(7, 5, num_layers=2, batch_first=True)
            self.norm = nn.LayerNorm(5)
            self.attention = nn.MultiheadAttention(5, 1, batch_first=True)
            self.head = nn.Linear(5, VOCABULARY)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.lstm(self.embed(tokens))[0])
            return self.head(x + self.attention(x, x, x)[0])

    return Model()


def shared_block() -> nn.Module:
    """One block that runs three times, as in ALBERT, and a weight read without its module."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, 8)
            block = OddBlock2()
            self.layers = nn.ModuleList([block, OddBlock2(), block])

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return x @ self.embed.weight.T

    return Model()


class OddBlock2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 11), nn.GELU(), nn.Linear(11, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def hf(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        small: dict[str, Any] = dict(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2,
                                     num_attention_heads=2, intermediate_size=24, max_position_embeddings=8)  # fmt: skip
        if kind == "gpt2":
            config: Any = transformers.GPT2Config(
                vocab_size=VOCABULARY, n_positions=8, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0,
                embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0)  # fmt: skip
            return transformers.GPT2LMHeadModel(config)
        if kind == "llama":
            config = transformers.LlamaConfig(**small, num_key_value_heads=1, use_cache=False)
            return transformers.LlamaForCausalLM(config)
        config = transformers.BertConfig(
            **small, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
        return transformers.BertForMaskedLM(config)

    return make


def resnet() -> nn.Module:
    from paceline.testing import make_resnet

    class Images(nn.Module):
        """The small residual network on images made of tokens; its norms do not mix samples."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, 48)
            self.net = make_resnet(classes=VOCABULARY).eval()

        def train(self, mode: bool = True) -> Images:
            super().train(mode)
            self.net.eval()
            return self

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            images = self.embed(tokens).view(-1, 3, 4, 4)
            return self.net(images).view(*tokens.shape, -1)

    return Images()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt, "mlp": mlp, "odd": Odd, "lstm": lstm, "shared": shared_block, "resnet": resnet,
    "hf-gpt2": hf("gpt2"), "hf-llama": hf("llama"), "hf-bert": hf("bert"),
}  # fmt: skip


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]().to(dtype)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def parts(step: int, rank: int, ranks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The microbatches of one rank, of the samples that one process sees at once."""
    inputs, targets = batch(step)
    mine = range(rank, SAMPLES, ranks)
    cut = [list(mine)[i::PARTS] for i in range(PARTS)]
    return [(inputs[index], targets[index]) for index in cut]


def make_optimizer(parameters: list[Any]) -> torch.optim.Optimizer:
    # A gradient that is zero but for rounding (BERT's key biases have one) must not be blown up.
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-4)


def reference(name: str, ranks: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The state after some steps on one process, and the norms of the gradients.

    It runs the microbatches of all ranks one by one: which parameters a model uses may depend on
    what it sees together.
    """
    loss = Loss(build(name))
    trained = [p for p in loss.parameters() if p.requires_grad]
    optimizer = make_optimizer(trained)
    norms = []
    for step in range(STEPS):
        for rank in range(ranks):
            for part in parts(step, rank, ranks):
                with DOUBLE.forward():
                    term = loss(part)
                (term.total / batch(step)[1].numel()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {k: v.clone() for k, v in loss.model.state_dict().items()}, norms
