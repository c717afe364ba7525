"""Models over the CPU and a real second device, run by test_device_map.py in a process of its own.

torch's lazy-tensor backend is a device of its own with tensors of its own kind, and part of every
build: what is not moved fails as it would on a GPU. It lacks the backward of attention, so these
models do without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._lazy
from torch import Tensor, nn

from paceline.parallel.device_map import place


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, *, extras: dict[str, list[Tensor]]) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(x))) * extras["scale"][0]


class Chain(nn.Module):
    """Blocks with a residual and a keyword that holds tensors; a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(Block(8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        extras = {"scale": [x.new_full((8,), 0.5)]}
        x = x + self.shift
        for block in self.blocks:
            x = block(x, extras=extras)
        return self.head(x)


class Skips(nn.Module):
    """Joins what distant layers gave: the code between modules meets two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(8, 8)
        self.middle = nn.Linear(8, 8)
        self.up = nn.Linear(16, 8)
        self.register_buffer("gain", torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.down(x))
        b = torch.tanh(self.middle(a)) * self.gain
        c = self.up(torch.cat([a, b], dim=-1))
        c += x
        return c


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.inner(torch.tanh(self.first(x)))))


CASES: list[tuple[Callable[[], nn.Module], dict[str, str]]] = [
    (Chain, {"": "cpu", "blocks.1": "lazy", "blocks.2": "lazy"}),
    (Chain, {"": "lazy", "blocks.0": "cpu", "head": "cpu"}),
    (Chain, {"": "cpu", "blocks.1.narrow": "lazy", "shift": "lazy"}),
    (Skips, {"": "cpu", "middle": "lazy"}),
    (Skips, {"down": "lazy", "middle": "cpu", "up": "lazy", "gain": "lazy"}),
    (Tied, {"": "cpu", "inner": "lazy"}),
]


def train(kind: Callable[[], nn.Module], device_map: dict[str, str] | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = kind()
    names = [name for name, _ in model.named_parameters()]
    if device_map is not None:
        placed = place(model, device_map)
        assert {device.type for device in placed.devices} == set(device_map.values())
        assert [name for name, _ in model.named_parameters()] == names
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    result: dict[str, Tensor] = {}
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        output = model(torch.randn(4, 8, generator=generator))
        loss = output.pow(2).mean()
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
        if device_map is not None:
            torch._lazy.mark_step()  # compute what is pending at once, not tensor by tensor
        result |= {f"loss {step}": loss.detach().cpu(), f"norm {step}": norm.cpu()}
        result |= {f"grad {n}": p.grad.cpu() for n, p in model.named_parameters()}  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    if device_map is not None:
        torch._lazy.mark_step()
    return result | {name: tensor.detach().cpu() for name, tensor in model.named_parameters()}


def main() -> None:
    lazy: Any = __import__("torch._lazy.ts_backend", fromlist=["init"])
    lazy.init()
    torch.set_default_dtype(torch.float64)
    for kind, device_map in CASES:
        expected, found = train(kind, None), train(kind, device_map)
        worst = max(
            float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-12))
            for name, value in expected.items()
        )
        print(f"{kind.__name__} {device_map}: {worst:.1e}", flush=True)
        assert worst < 1e-9, (kind.__name__, device_map)
    print("all the same")


if __name__ == "__main__":
    main()
