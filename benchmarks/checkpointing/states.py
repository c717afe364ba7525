"""A state whose every byte is known: a GPT's parameters and Adam's moments, drawn from a number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.boxes import Box
from paceline.checkpoint.rank_state import Part, Piece, RankState, whole_part
from paceline.models import GPT

_ODD = 0x01000193

Shapes = dict[str, tuple[int, ...]]


def gpt_shapes(layers: int, width: int, vocab: int = 256, context: int = 64) -> Shapes:
    """Names and shapes of all that a run of this GPT with Adam saves."""
    with torch.device("meta"):
        model = GPT(vocab, context, layers, heads=4, width=width)
    shapes: Shapes = {}
    for name, parameter in model.named_parameters():
        shapes[f"model/{name}"] = tuple(parameter.shape)
        for moment in ("exp_avg", "exp_avg_sq"):
            shapes[f"optimizer/{name}/{moment}"] = tuple(parameter.shape)
        shapes[f"optimizer/{name}/step"] = ()
    return shapes


def size_of(shapes: Shapes) -> int:
    """Bytes of float32 tensors of these shapes."""
    return sum(4 * torch.Size(shape).numel() for shape in shapes.values())


def whole_tensors(shapes: Shapes, seed: int) -> dict[str, Tensor]:
    """The tensors that ``seed`` stands for, whole."""
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    redraw(tensors, seed)
    return tensors


def redraw(tensors: dict[str, Tensor], seed: int) -> None:
    """Give ``tensors`` other values, in place, as a training step would.

    Bits that depend on the seed, the tensor and the place in it: fast, and all different.
    """
    first = 0
    for tensor in tensors.values():
        bits = tensor.view(-1).view(torch.int32)
        torch.arange(first, first + len(bits), out=bits)
        bits.mul_(_ODD).bitwise_xor_(_mixed(seed))
        first += len(bits)


def rows_of(length: int, rank: int, world: int) -> tuple[int, int]:
    """First and last-but-one of the rows a rank has, cut as torch cuts a ``Shard(0)``."""
    chunk = -(-length // world)
    return min(rank * chunk, length), min((rank + 1) * chunk, length)


def rows_in(tensors: dict[str, Tensor], rank: int, world: int) -> dict[str, Tensor]:
    """The rows of each whole tensor that a rank has, as views; what has no rows, whole."""
    return {
        name: tensor[slice(*rows_of(len(tensor), rank, world))] if tensor.ndim else tensor
        for name, tensor in tensors.items()
    }


def own_rows(shapes: Shapes, rank: int, world: int) -> dict[str, Tensor]:
    """The same in memory of their own, without the whole ones ever being there."""
    rows: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        first, end = rows_of(shape[0], rank, world) if shape else (0, 0)
        rows[name] = torch.empty((end - first, *shape[1:]) if shape else ())
    redraw(rows, rank)
    for name, shape in shapes.items():
        if not shape:  # the same on every rank
            rows[name].fill_(1.0)
    return rows


def state_of(
    rows: dict[str, Tensor], shapes: Shapes, rank: int, world: int, objects: Any = None
) -> RankState:
    """What a rank gives to a save, or wants to be filled, that has these ``rows``."""
    parts: dict[str, Part] = {}
    for name, tensor in rows.items():
        shape = shapes[name]
        first = rows_of(shape[0], rank, world)[0] if shape else 0
        offset = (first, *(0 for _ in shape[1:])) if shape else ()
        piece = Piece(Box(offset, tuple(tensor.shape)), tensor)
        parts[name] = Part(shape, tensor.dtype, (piece,) if tensor.numel() else ())
    return RankState(parts, objects or {})


def whole_parts(tensors: dict[str, Tensor]) -> dict[str, Part]:
    """Whole tensors, to be filled."""
    return {name: whole_part(tensor) for name, tensor in tensors.items()}


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The names of tensors that are not bitwise-identical."""
    return [
        name
        for name, tensor in expected.items()
        if name not in found
        or found[name].shape != tensor.shape
        or found[name].dtype != tensor.dtype
        or not torch.equal(_bits(found[name]), _bits(tensor))
    ]


def _mixed(seed: int) -> int:
    """The seed, spread over 31 bits."""
    return (seed * 0x9E3779B97F4A7C15 >> 20) & 0x7FFFFFFF


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
