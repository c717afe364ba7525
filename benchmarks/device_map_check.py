"""A model over the CPU and a GPU of one process against the CPU alone: float64, three steps.

python benchmarks/device_map_check.py          # needs a GPU
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.models import GPT, token_cross_entropy
from paceline.parallel.device_map import place
from paceline.parallel.recompute import recompute

TOKENS = torch.randint(0, 64, (3, 4, 33), generator=torch.Generator().manual_seed(1))


def make() -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocab_size=64, context=32, layers=6, heads=4, width=64).double()


def train(change: Callable[[nn.Module], Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of three steps, and the parameters after them."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # before placing, as engines do
    change(model)
    numbers = []
    for tokens in TOKENS:
        output = model(tokens[:, :-1])
        total, count = token_cross_entropy(output, tokens[:, 1:].to(output.device))
        loss = total / count
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        numbers += [loss.item(), norm.item()]
    return numbers, {name: p.detach().cpu() for name, p in model.named_parameters()}


def worst(ours: Any, theirs: Any) -> float:
    numbers = max(abs(a - b) / abs(b) for a, b in zip(ours[0], theirs[0], strict=True))
    parameters = max(
        float((ours[1][name] - value).abs().max() / value.abs().max())
        for name, value in theirs[1].items()
    )
    return max(numbers, parameters)


def checkpointed(model: nn.Module) -> None:
    place(model, {"": "cpu", "blocks.2": "cuda:0", "blocks.3": "cuda:0"})
    recompute(model, "full")


def automatic(model: nn.Module) -> None:
    size = sum(p.nbytes for p in model.parameters())
    placed = place(
        model,
        "auto",
        sample=lambda m: m(TOKENS[0, :, :-1]),
        max_memory={"cuda:0": 4 * size // 2},  # half of what it needs: the rest stays on the CPU
    )
    print(placed)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("needs a GPU: torch.cuda.is_available() is false.")
    expected = train(lambda model: None)
    block = "blocks.1"
    parts = [name for name, _ in make().get_submodule(block).named_children()]
    cases: dict[str, Callable[[nn.Module], Any]] = {
        "all on the GPU": lambda m: place(m, {"": "cuda:0"}),
        "last blocks on the GPU": lambda m: place(
            m, {"": "cpu", "blocks.3": "cuda:0", "blocks.4": "cuda:0", "blocks.5": "cuda:0"}
        ),
        "every other block": lambda m: place(
            m, {"": "cuda:0", "blocks.0": "cpu", "blocks.2": "cpu", "blocks.4": "cpu"}
        ),
        "a block cut in two": lambda m: place(m, {"": "cpu", f"{block}.{parts[-1]}": "cuda:0"}),
        "with activation checkpointing": checkpointed,
        "auto": automatic,
    }
    failed = False
    for name, change in cases.items():
        difference = worst(train(change), expected)
        failed |= difference > 1e-9
        print(f"{name:32}{difference:.1e}  {'same' if difference <= 1e-9 else 'DIFFERENT'}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
