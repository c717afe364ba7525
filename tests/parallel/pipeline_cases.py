"""Small models for pipelines, with their batches, and what one process computes with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.engine.loss import LossModule
from paceline.engine.precision import Precision
from paceline.models.gpt import GPT, token_cross_entropy
from paceline.testing import make_resnet

SCALE = 0.1
# Hugging Face models cast to float32 on the way; this keeps them from it.
DOUBLE = Precision("fp64", torch.device("cpu"))
# The samples of each microbatch by step: even, uneven, another length with a placeholder last.
STEPS = ((2, 2, 2, 2), (3, 1, 2, 3), (1, 2, 2, 1))
PLACEHOLDER = (2, 3)


class UNet(nn.Module):
    """Skips over several stages, a residual from the start, parameters used between modules."""

    def __init__(self, depth: int = 4, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(width))
        self.out = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.down[0](x) * self.scale
        skips = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            skips.append(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, skips.pop()], -1)))
        return self.out(x + first)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0] * ctx.saved_tensors[0]


class Odd(nn.Module):
    """Integers and masks that cross, writes in place, a custom function, a weight used directly."""

    def __init__(self, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        best, positive = x.argmax(-1), x > 0
        half = x.new_zeros(x.shape)
        half[:, :4] = x[:, :4]
        for layer in self.layers:
            x = layer(torch.relu_(Square.apply(x) + half))
        x = self.norm(x) + F.one_hot(best, x.shape[-1]) * positive
        return F.linear(x, self.first.weight)[:, :4]


class Repeated(nn.Module):
    """One block, called again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.block = nn.Linear(8, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(4):
            x = x + torch.tanh(self.block(x))
        return self.out(x)


def kept_cross_entropy(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A loss that picks samples by their values."""
    kept = target > 0
    return F.cross_entropy(output[kept], target[kept], reduction="sum"), kept.sum()


@dataclass
class Case:
    module: LossModule
    batch: Callable[[int, int], Any]


def tokens(seed: int, samples: int) -> Any:
    ids = torch.randint(1, 37, (samples, 9), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def labelled(seed: int, samples: int) -> Any:
    ids = tokens(seed, samples)[0]
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def vectors(seed: int, samples: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (samples,), generator=generator)


def images(seed: int, samples: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples + 1, 3, 8, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (samples + 1,), generator=generator)


def make(name: str) -> Case:
    torch.manual_seed(0)
    if name == "gpt":
        model = GPT(vocab_size=37, context=16, layers=4, heads=2, width=16).double()
        return Case(LossModule(model, token_cross_entropy), tokens)
    if name == "mlp":
        layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.ReLU(inplace=True))]
        return Case(LossModule(nn.Sequential(*layers).double(), nn.CrossEntropyLoss()), vectors)
    if name == "resnet":
        return Case(LossModule(make_resnet(dtype=torch.float64), F.cross_entropy), images)
    if name in ("unet", "odd", "repeated"):
        made = {"unet": UNet, "odd": Odd, "repeated": Repeated}[name]()
        loss = kept_cross_entropy if name == "odd" else nn.CrossEntropyLoss()
        return Case(LossModule(made.double(), loss), vectors)
    if name in ("frozen-start", "frozen-end"):
        case = make("mlp")
        frozen = case.module.model[:4] if name == "frozen-start" else case.module.model[4:]
        frozen.requires_grad_(False)
        return case
    return Case(LossModule(_hugging_face(name).double()), labelled)


def _hugging_face(name: str) -> nn.Module:
    import transformers as hf

    sizes = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    wide = {"intermediate_size": 32, "max_position_embeddings": 32}
    if name == "gpt2":
        sizes = {"vocab_size": 37, "n_layer": 4, "n_head": 2, "n_embd": 16, "n_positions": 16}
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "eos_token_id": 0}
        return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **off, bos_token_id=0))
    if name == "t5":
        sizes = {"vocab_size": 37, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2}
        return hf.T5ForConditionalGeneration(
            hf.T5Config(**sizes, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0)
        )
    if name == "bert":
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return hf.BertForMaskedLM(hf.BertConfig(**sizes, **wide, **off))
    kinds = {
        "llama": (hf.LlamaForCausalLM, hf.LlamaConfig),
        "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config),
    }
    model, config = kinds[name]
    return model(config(**sizes, **wide, num_key_value_heads=1))


def parts(case: Case, step: int, share: int = 0) -> list[tuple[Any, int]]:
    """The microbatches of one step, for one data-parallel share."""
    made = []
    for index, samples in enumerate(STEPS[step]):
        batch = case.batch(1000 * share + 100 * step + index, samples)
        placeholder = (step, index) == PLACEHOLDER
        made.append((batch, 0 if placeholder else case.module.items(batch)))
    return made


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    # Not Adam: where a gradient is zero but for rounding it moves by a whole learning rate.
    return torch.optim.SGD(list(parameters), lr=0.1, momentum=0.9)


def reference(name: str, shares: int = 1) -> Any:
    """Three steps in one process: losses, state, and the losses of an evaluation."""
    case = make(name)
    trained = optimizer(case.module.parameters())
    losses = []
    for step in range(len(STEPS)):
        trained.zero_grad()
        total, count = 0.0, 0
        for share in range(shares):
            for batch, items in parts(case, step, share):
                if not items:  # a placeholder: one process has none
                    continue
                with DOUBLE.forward():
                    term = case.module(batch, items)
                (term.total * SCALE).backward()
                total, count = total + float(term.total.detach()), count + int(term.count)
        trained.step()
        losses.append(total / count)
    case.module.eval()
    with torch.no_grad(), DOUBLE.forward():
        evaluated = [float(case.module(batch, items or 1).total) for batch, items in parts(case, 0)]
    state = {k: v.clone() for k, v in case.module.model.state_dict().items()}
    return losses, state, evaluated
