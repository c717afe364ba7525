"""Experts whose weights are stacked, one for each expert along the first dimension.

Hugging Face's mixture-of-experts models hold them so. Each rank takes a part of the hidden features
of every expert and runs the module's own forward on it; the outputs of the ranks add up to the
whole. Which dimension is the hidden one, and how gate and value are packed in it, is found by
trying a small copy: parts that do not add up stay whole.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from paceline.nested import map_tensors
from paceline.parallel.tensor.linear import shared_input
from paceline.parallel.tensor.shards import cut_part, gathered, replicated, summed

Parts = dict[str, tuple[int, int] | None]
"""By parameter: the dimension and the chunks that are split; ``None``: added once, by one rank."""

_WIDTH, _HIDDEN, _TOKENS, _CHOICES = 16, 32, 6, 2  # of the small copy
_found: dict[Any, Parts | None] = {}


def expert_parts(module: nn.Module) -> Parts | None:
    """How the parameters of stacked experts are split; ``None`` for any other module."""
    held = {key: p for key, p in module._parameters.items() if p is not None}
    stacked = [key for key, p in held.items() if p.ndim == 3]
    if len(stacked) != 2 or any(p.ndim not in (2, 3) for p in held.values()):
        return None
    if any(isinstance(p, DTensor) for p in held.values()):
        return None
    if any(True for child in module.children() for _ in child.parameters()):
        return None
    key = (type(module), tuple((name, p.shape) for name, p in held.items()))
    if key not in _found:
        guesses = _guesses(held, stacked)
        _found[key] = next((parts for parts in guesses if _adds_up(module, parts)), None)
    return _found[key]


def hidden_features(module: nn.Module) -> int:
    """How many hidden features each expert has: what the ranks share."""
    held = {key: p for key, p in module._parameters.items() if p is not None}
    return _hidden(held, expert_parts(module) or {})


def _guesses(held: Mapping[str, Tensor], stacked: list[str]) -> Iterator[Parts]:
    """All ways in which the shapes allow one weight to lead to hidden features, one from them."""
    others = [key for key in held if key not in stacked]
    for up, down in (stacked, stacked[::-1]):
        for up_dim, down_dim, chunks in itertools.product((1, 2), (1, 2), (2, 1)):
            hidden, width = held[down].shape[down_dim], held[down].shape[3 - down_dim]
            many, rest = divmod(held[up].shape[up_dim], hidden)
            if rest or held[up].shape[3 - up_dim] != width or many not in (1, 2) or chunks > many:
                continue
            ways: list[list[tuple[int, int] | None]] = [
                [
                    part
                    for part, size in (((1, chunks), many * hidden), (None, width))
                    if held[key].shape[1] == size
                ]
                for key in others
            ]
            for way in itertools.product(*ways):
                yield {
                    up: (up_dim, chunks),
                    down: (down_dim, 1),
                    **dict(zip(others, way, strict=True)),
                }


@torch.no_grad()
def _adds_up(module: nn.Module, parts: Parts) -> bool:
    """Whether a small copy, cut in two as ``parts`` says, gives parts of what it gives whole."""
    generator = torch.Generator().manual_seed(0)
    held = {key: p for key, p in module._parameters.items() if p is not None}
    hidden = _hidden(held, parts)
    experts = next(iter(held.values())).shape[0]
    small: dict[str, Tensor] = {}
    for key, part in parts.items():
        shape = [experts, *[_WIDTH] * (held[key].ndim - 1)]
        if part is not None:
            shape[part[0]] = held[key].shape[part[0]] // hidden * _HIDDEN
        small[key] = torch.randn(shape, generator=generator)
    x = torch.randn(_TOKENS, _WIDTH, generator=generator)
    index = torch.randint(experts, (_TOKENS, _CHOICES), generator=generator)
    weights = torch.rand(_TOKENS, _CHOICES, generator=generator)

    def run(parameters: dict[str, Tensor]) -> Any:
        trial: Any = copy.copy(module)
        trial._parameters = dict(parameters)
        return trial.forward(x, index, weights)

    try:
        whole = run(small)
        halves = [run({k: _part(small[k], parts[k], rank) for k in parts}) for rank in range(2)]
    except Exception:  # someone else's forward, tried on a guess: any failure says "not this"
        return False
    alike = isinstance(whole, Tensor) and whole.shape == x.shape
    return alike and torch.allclose(halves[0] + halves[1], whole, rtol=1e-3, atol=1e-3)


def _part(tensor: Tensor, part: tuple[int, int] | None, rank: int) -> Tensor:
    if part is None:
        return tensor if rank == 0 else torch.zeros_like(tensor)
    return cut_part(tensor, 2, rank, *part)


def _hidden(held: Mapping[str, Tensor], parts: Parts) -> int:
    return min(held[key].shape[part[0]] for key, part in parts.items() if part is not None)


def split_experts(
    module: nn.Module,
    forward: Callable[..., Tensor],
    mesh: DeviceMesh,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """``forward``, of experts whose parameters are split, on this rank's part of each; summed."""
    held: dict[str, Any] = module._parameters
    whole = {key: p for key, p in held.items() if p is not None}
    # During the call alone, the module holds plain tensors: this rank's parts.
    held.update({key: _own(p, mesh) for key, p in whole.items()})
    try:
        y = forward(*map_tensors(args, _input(mesh)), **map_tensors(kwargs, _input(mesh)))
    finally:
        held.update(whole)
    return summed(y, mesh)


def _own(parameter: Tensor, mesh: DeviceMesh) -> Tensor:
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    # A bias after the sum: one rank adds it, and all learn its gradient.
    shared = replicated(parameter, mesh).to_local(grad_placements=[Partial()])
    return shared if mesh.get_local_rank() == 0 else shared * 0


def _input(mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    def whole(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return gathered(tensor)
        return shared_input(tensor, mesh).to_local(grad_placements=[Partial()])

    return whole
