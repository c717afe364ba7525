"""Models of many kinds, and training them split beside training them whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from paceline.engine.precision import Precision
from paceline.models.gpt import GPT, token_cross_entropy
from paceline.parallel.tensor import apply_plan, full_tensor, make_plan, mixing, plain
from paceline.testing import make_resnet

Case = tuple[nn.Module, Callable[[], Any], Callable[[nn.Module, Any], Tensor]]


class VisionAttention(nn.Module):
    """Attention written out, queries, keys and values unbound from one projection."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(self.norm(x)).reshape(b, n, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1)).softmax(-1)
        return x + self.proj((weights @ v).transpose(1, 2).reshape(b, n, c))


class EinsumAttention(nn.Module):
    """Attention by einsum, projections apart, fewer heads of keys, a bias for every head."""

    def __init__(self, width: int = 32, heads: int = 8, kv_heads: int = 4) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_heads * self.size, bias=False)
        self.value = nn.Linear(width, kv_heads * self.size)
        self.out = nn.Linear(width, width)
        self.slopes = nn.Parameter(torch.linspace(0.1, 1, heads).view(1, heads, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.query(x).view(b, t, self.heads, self.size)
        k = self.key(x).view(b, t, self.kv_heads, self.size)
        v = self.value(x).view(b, t, self.kv_heads, self.size)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 2) for y in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / self.size**0.5
        scores = scores + self.slopes * torch.arange(t, device=x.device)
        y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        return x + self.out(y.reshape(b, t, -1))


class GatedMLP(nn.Module):
    """A gate and a value in one projection."""

    def __init__(self, width: int = 32, hidden: int = 48, glu: bool = False) -> None:
        super().__init__()
        self.glu = glu
        self.gate_up = nn.Linear(width, 2 * hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        if self.glu:
            return x + self.down(F.glu(both))
        gate, up = both.chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Vision(nn.Module):
    """Patches by convolution, two kinds of attention and of perceptron, mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, 4)
        self.place = nn.Parameter(torch.randn(1, 16, 32) * 0.1)
        self.blocks = nn.Sequential(
            VisionAttention(), GatedMLP(), EinsumAttention(), GatedMLP(glu=True)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2) + self.place
        return self.head(self.blocks(x).mean(1))


def hugging_face(name: str) -> nn.Module:
    import transformers

    sizes = dict(hidden_size=32, num_hidden_layers=2, max_position_embeddings=32)
    grouped = dict(num_attention_heads=8, num_key_value_heads=4, intermediate_size=48)
    none = dict(bos_token_id=None, eos_token_id=None)
    if name == "gpt2":
        gpt2 = dict(n_embd=32, n_layer=2, n_head=4, n_positions=32, vocab_size=259)
        off = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM")
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2, **off, **none))
    if name in ("llama", "llama-2kv"):
        grouped["num_key_value_heads"] = 4 if name == "llama" else 2
        config = transformers.LlamaConfig(vocab_size=257, attention_bias=True, **sizes, **grouped)
        return transformers.LlamaForCausalLM(config)
    if name in ("mixtral", "gemma2"):
        kind = {"mixtral": "Mixtral", "gemma2": "Gemma2"}[name]
        special = dict(num_local_experts=3) if name == "mixtral" else dict(head_dim=8)
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=64, **sizes, **grouped, **special
        )
        config._experts_implementation = "eager"  # the grouped product has no float64
        return getattr(transformers, f"{kind}ForCausalLM")(config)
    if name == "qwen2":
        config = transformers.Qwen2Config(
            vocab_size=256, tie_word_embeddings=True, **sizes, **grouped
        )
        return transformers.Qwen2ForCausalLM(config)
    if name == "qwen3":
        config = transformers.Qwen3Config(vocab_size=256, head_dim=8, **sizes, **grouped)
        return transformers.Qwen3ForCausalLM(config)
    assert name == "bert"
    bert = dict(num_attention_heads=4, intermediate_size=64, vocab_size=259)
    off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**bert, **off, **sizes))


def _classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _mean_token_loss(model: nn.Module, batch: Any) -> Tensor:
    total, count = token_cross_entropy(model(batch[0]), batch[1])
    return total / count


def _own_loss(model: Any, batch: Any) -> Tensor:
    return model(**batch).loss


def _tokens(vocab: int) -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(vocab, (2, 16)), torch.randint(vocab, (2, 16))
    targets[0, :3] = -100
    return tokens, targets


def _labelled(vocab: int) -> dict[str, Tensor]:
    tokens, labels = _tokens(vocab)
    return dict(input_ids=tokens, labels=labels, attention_mask=torch.ones_like(tokens))


def case(name: str) -> Case:
    """``(model, batch maker, loss)``: float64, the same on every rank."""
    torch.manual_seed(0)
    wide = torch.float64
    if name.startswith("gpt "):
        model: nn.Module = GPT(
            vocab_size=259, context=16, layers=2, heads=4, width=32, tied=name == "gpt tied"
        )
        made: Case = (model, lambda: _tokens(259), _mean_token_loss)
    elif name == "mlp":
        model = nn.Sequential(
            *(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))
        )
        made = (model, lambda: (torch.randn(6, 8, dtype=wide), torch.randint(4, (6,))), _classify)
    elif name == "convnet":
        images = (4, 3, 8, 8)
        made = (
            make_resnet(),
            lambda: (torch.randn(images, dtype=wide), torch.randint(4, (4,))),
            _classify,
        )
    elif name == "encoder":
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
        model = nn.Sequential(
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 4)
        )
        made = (
            model,
            lambda: (torch.randn(4, 5, 16, dtype=wide), torch.randn(4, 5, 4, dtype=wide)),
            lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        )
    elif name == "vision":
        made = (
            Vision(),
            lambda: (torch.randn(2, 3, 16, 16, dtype=wide), torch.randint(10, (2,))),
            _classify,
        )
    else:
        hf: Any = hugging_face(name.split()[0])
        if name.endswith("eager"):
            hf.set_attn_implementation("eager")
        made = (hf, lambda: _labelled(hf.config.vocab_size), _own_loss)
    made[0].double().train()
    return made


def tp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def double() -> Any:
    """The context of a float64 run."""
    return Precision("fp64", torch.device("cpu")).forward()


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm().clamp(min=1e-12))


def worst_after_three_steps(name: str, sequence: bool = False) -> tuple[float, str]:
    """Train whole and split side by side; the largest relative difference and where."""
    mesh = tp_mesh()
    whole, batches, loss = case(name)
    split = copy.deepcopy(whole)
    first = batches()
    plan = make_plan(split, mesh.size(), sample=lambda m: loss(m, first), sequence=sequence)
    apply_plan(split, plan, mesh)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (whole, split)]
    worst = (0.0, "nothing")
    for step in range(3):
        batch = batches()
        with double():
            expected = loss(whole, batch)
        with double(), mixing(mesh):
            got = plain(loss(split, batch))
        expected.backward()
        got.backward()
        worst = max(worst, (relative(got.detach(), expected.detach()), f"step {step}: loss"))
        pairs = list(zip(whole.named_parameters(), split.parameters(), strict=True))
        assert [n for n, _ in whole.named_parameters()] == [n for n, _ in split.named_parameters()]
        for (key, a), b in pairs:
            if float(a.grad.norm()) < 1e-12:  # zero on paper: noise, which Adam would blow up
                a.grad.zero_()
                b.grad.zero_()
                continue
            difference = relative(full_tensor(b.grad), a.grad)
            worst = max(worst, (difference, f"step {step}: gradient of {key}"))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (key, a), b in pairs:
            worst = max(worst, (relative(full_tensor(b), a), f"step {step}: {key}"))
    return worst
