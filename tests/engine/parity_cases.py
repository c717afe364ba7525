"""Models, data and a plain torch loop to hold the engine against; nothing here uses Paceline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

GLOBAL_BATCHES = (12, 12, 12, 12, 7)
"""Five steps, the last one short: over 3 ranks it is 3, 2, 2 samples."""


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    loss: Any
    mean_loss: Callable[[nn.Module, Any], torch.Tensor]
    """The loss of a whole batch, as a person would write it."""
    batchnorm: bool = False


class SmallResNet(nn.Module):
    """Two residual blocks with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(8, 8, 3, padding=1, bias=False),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.Conv2d(8, 8, 3, padding=1, bias=False),
                nn.BatchNorm2d(8),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = F.relu(x + block(x))
        return self.head(x.mean(dim=(2, 3)))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def _gpt() -> nn.Module:
    from paceline.models import GPT

    return GPT(vocab_size=17, context=8, layers=2, heads=2, width=16)


def _hf_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=19, n_positions=8, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + step)


def _regression(step: int, n: int) -> Any:
    g = _generator(step)
    x = torch.randn(n, 6, generator=g, dtype=torch.float64)
    return x, torch.randn(n, 3, generator=g, dtype=torch.float64)


def _images(step: int, n: int) -> Any:
    g = _generator(step)
    x = torch.randn(n, 3, 6, 6, generator=g, dtype=torch.float64)
    return x, torch.randint(0, 5, (n,), generator=g)


def _padded_text(step: int, n: int) -> Any:
    """Sequences whose padding differs, so that ranks see different numbers of tokens."""
    g = _generator(step)
    tokens = torch.randint(0, 17, (n, 9), generator=g)
    inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    lengths = torch.randint(1, 9, (n,), generator=g)
    targets[torch.arange(8) >= lengths[:, None]] = -100
    return inputs, targets


def _hf_text(step: int, n: int) -> Any:
    g = _generator(step)
    ids = torch.randint(0, 19, (n, 8), generator=g)
    lengths = torch.randint(2, 9, (n,), generator=g)
    mask = (torch.arange(8) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _gpt_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _hf_mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    # By hand, because the model's own loss casts float64 logits to float32.
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return _gpt_loss(logits[:, :-1], batch["labels"][:, 1:])


def _token_sum(logits: torch.Tensor, targets: torch.Tensor) -> Any:
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


CASES = {
    "mlp": Case(
        _mlp, _regression, nn.MSELoss(), lambda m, b: F.mse_loss(m(b[0]), b[1])
    ),
    "resnet": Case(
        SmallResNet,
        _images,
        nn.CrossEntropyLoss(),
        lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        batchnorm=True,
    ),
    "gpt": Case(_gpt, _padded_text, _token_sum, lambda m, b: _gpt_loss(m(b[0]), b[1])),
    "hf-gpt2": Case(_hf_gpt2, _hf_text, None, _hf_mean_loss),
}  # fmt: skip


def build(case: Case, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return case.model().to(dtype)


def whole_batch(case: Case, step: int, dtype: torch.dtype) -> Any:
    batch = case.batch(step, GLOBAL_BATCHES[step])
    return tree(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)


def tree(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(batch, dict):
        return {k: change(v) for k, v in batch.items()}
    return tuple(change(v) for v in batch)


def bounds(total: int, parts: int) -> list[tuple[int, int]]:
    """Near-equal slices of ``range(total)``, larger ones first."""
    sizes = [total // parts + (i < total % parts) for i in range(parts)]
    return [(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(parts)]


def microbatch_for(global_batch: int, ranks: int, accumulation: int) -> int:
    """The microbatch that makes the largest share ``accumulation`` parts."""
    largest = -(-global_batch // ranks)
    return -(-largest // accumulation)


def together(total: int, ranks: int, microbatch: int) -> list[list[int]]:
    """Which samples pass through a synchronised norm at the same time, forward by forward."""
    forwards: list[list[int]] = []
    for start, stop in bounds(total, ranks):
        parts = -(-(stop - start) // microbatch)
        for index, (a, b) in enumerate(bounds(stop - start, parts) if parts else []):
            if index == len(forwards):
                forwards.append([])
            forwards[index] += range(start + a, start + b)
    return forwards


def reference(
    case: Case, dtype: torch.dtype, *, ranks: int = 1, microbatch: int | None = None
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """One process on the whole batch: losses, gradient norms and the final state.

    Batch normalisation sees the samples of one forward at a time, so there the batch is cut the
    way ``ranks`` ranks with this ``microbatch`` would cut it.
    """
    model = build(case, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step, size in enumerate(GLOBAL_BATCHES):
        batch = whole_batch(case, step, dtype)
        groups = [list(range(size))]
        if case.batchnorm and microbatch is not None:
            groups = together(size, ranks, microbatch)
        loss = torch.zeros((), dtype=dtype)
        for group in groups:
            index = torch.tensor(group)
            part = tree(batch, lambda t, index=index: t[index])
            loss = loss + case.mean_loss(model, part) * (len(group) / size)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, {k: v.clone() for k, v in model.state_dict().items()}
