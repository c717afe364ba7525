"""Which modules can be split, told by what they compute and not by their names."""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.parallel.tensor.experts import expert_parts, hidden_features
from paceline.parallel.tensor.multihead_attention import attention_parts
from paceline.parallel.tensor.plan import chunks_of

Kind = Literal["out_first", "in_first", "embedding", "attention", "experts"]
"""A linear layer whose weight is (out, in), one whose weight is (in, out), an embedding, an
``nn.MultiheadAttention``, or stacked experts."""

_found: dict[tuple[type, torch.Size, bool], Kind | None] = {}


def kind_of(module: nn.Module) -> Kind | None:
    """What ``module`` is; ``None`` for everything that cannot be split by its weight alone."""
    if isinstance(module, nn.Embedding):
        return "embedding" if type(module).forward is nn.Embedding.forward else None
    if isinstance(module, nn.MultiheadAttention):
        return "attention" if type(module).forward is nn.MultiheadAttention.forward else None
    if expert_parts(module) is not None:
        return "experts"
    weight = module._parameters.get("weight")
    bias = module._parameters.get("bias")
    others = set(module._parameters) - {"weight", "bias"}
    if not isinstance(weight, Tensor) or weight.ndim != 2 or others or len(module._modules):
        return None
    if bias is not None and bias.ndim != 1:
        return None
    if type(module).forward is nn.Linear.forward:
        return "out_first"
    if isinstance(weight, DTensor) or not weight.is_floating_point():
        return None
    key = (type(module), weight.shape, bias is not None)
    if key not in _found:
        _found[key] = _try_out(module)
    return _found[key]


def why_not_split(module: nn.Module) -> str | None:
    """Why a module that holds a weight like a linear layer's or an embedding's stays whole."""
    if isinstance(module, nn.Embedding):
        options = [
            name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, name)
        ]
        if options:
            return f"an embedding with {', '.join(options)} is not split"
        return None if kind_of(module) else "an embedding with a forward of its own"
    return None


def features(module: nn.Module) -> tuple[int, int]:
    """``(in, out)`` of a linear layer."""
    weight = module._parameters["weight"]
    assert weight is not None
    rows, columns = weight.shape
    return (rows, columns) if kind_of(module) == "in_first" else (columns, rows)


def parts(kind: Kind, role: str, module: nn.Module) -> dict[str, tuple[int, int]]:
    """``{parameter: (dim, chunks)}`` that a role splits; a row-parallel bias stays whole."""
    if kind == "attention":
        assert isinstance(module, nn.MultiheadAttention)
        return attention_parts(module)
    if kind == "experts":
        found = expert_parts(module) or {}
        return {key: part for key, part in found.items() if part is not None}
    chunks = chunks_of(role)
    if role == "row":
        return {"weight": (0 if kind == "in_first" else 1, 1)}
    made = {"weight": (1 if kind == "in_first" else 0, chunks)}
    if module._parameters.get("bias") is not None:
        made["bias"] = (0, chunks)
    return made


def why_not_divided(kind: Kind, module: nn.Module, tp: int) -> str | None:
    """Why heads or experts cannot be spread over ``tp`` ranks; ``None`` if they can."""
    if kind == "attention":
        assert isinstance(module, nn.MultiheadAttention)
        heads = module.num_heads
        return f"its {heads} heads do not divide by tp={tp}" if heads % tp else None
    hidden = hidden_features(module)
    if hidden % (_ALIGNED * tp):
        return (
            f"its {hidden} hidden features are no multiple of {_ALIGNED} on each of {tp} ranks, "
            "which grouped products need"
        )
    return None


_ALIGNED = 8  # 16 bytes in bf16


def splittable_modules(model: nn.Module) -> list[str]:
    """The names of the modules of ``model`` that can be split."""
    names: list[str] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind == "attention":  # its output projection is a module, but never called as one
            inside.update(id(child) for child in module.children())
        if kind is not None and id(module) not in inside:
            names.append(name)
    return names


@torch.no_grad()
def _try_out(module: nn.Module) -> Kind | None:
    """Compare what a copy with random weights computes with a product, either way round."""
    trial = copy.copy(module)
    trial._parameters = {}
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            trial._parameters[name] = nn.Parameter(values)
        else:
            trial._parameters[name] = None
    weight, bias = trial._parameters["weight"], trial._parameters.get("bias")
    assert weight is not None
    for kind, matrix in (("out_first", weight.t()), ("in_first", weight)):
        x = torch.randn(2, 3, matrix.shape[0], generator=generator, dtype=torch.float64)
        try:
            y = trial.forward(x)
        except Exception:  # someone else's forward, tried on a guess: any failure says "not this"
            continue
        expected = (
            x @ matrix if bias is None or bias.shape[0] != matrix.shape[1] else x @ matrix + bias
        )
        if isinstance(y, Tensor) and y.shape == expected.shape and torch.allclose(y, expected):
            return kind  # type: ignore[return-value]
    return None
