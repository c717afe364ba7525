"""What a model predicts, as rows: one for each sample, whatever the model returns around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import paceline.nested as nested
from paceline.errors import TrainingError

Rows = Tensor | dict[str, Tensor]
"""A tensor whose first dimension is the samples; by name where a model returns several."""

Take = str | Callable[[Any], Any] | None
"""What to keep of a model's output: the part of this name, what a function makes of it, or all."""


def rows_of(output: Any, samples: int, take: Take = None) -> Rows:
    """The rows of ``output``, which a model returned for so many ``samples``.

    Numbers and ``None`` in it (such as the loss of a model that computes its own) are left out.
    Anything else that is not a tensor with a row for each sample is refused.
    """
    chosen = _taken(output, take)
    if isinstance(chosen, Tensor):
        if chosen.ndim == 0 or chosen.shape[0] != samples:
            raise TrainingError(_not_rows("the output", chosen, samples))
        return chosen.detach()
    rows: dict[str, Tensor] = {}
    for name, leaf in _named_leaves(chosen):
        if _belongs_to_the_batch(leaf):
            continue
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or leaf.shape[0] != samples:
            raise TrainingError(_not_rows(f"{name!r} of the output", leaf, samples))
        rows[name] = leaf.detach()
    if not rows:
        raise TrainingError(
            f"the model's output ({type(chosen).__name__}) holds no tensor with a row for each "
            "sample, so there is nothing to predict. A model that returns only its loss needs "
            "forward=f, called as f(model, batch), which returns what to predict."
        )
    return rows


def joined(parts: Sequence[Rows]) -> Rows:
    """Rows one after the other."""
    first = parts[0]
    if isinstance(first, Tensor):
        return _cat([part for part in parts if isinstance(part, Tensor)], "output", len(parts))
    several = [part for part in parts if isinstance(part, dict)]
    if any(part.keys() != first.keys() for part in several):
        raise TrainingError(
            f"the model's output holds {', '.join(first)} for one batch and other parts for "
            "another. Choose what all have with take=."
        )
    return {name: _cat([part[name] for part in several], name, len(parts)) for name in first}


def count_of(rows: Rows) -> int:
    """How many rows there are."""
    return len(rows if isinstance(rows, Tensor) else next(iter(rows.values())))


def to_host(rows: Rows) -> Rows:
    """The rows on the CPU."""
    return on_device(rows, torch.device("cpu"))


def on_device(rows: Rows, device: torch.device) -> Rows:
    """The rows on ``device``."""
    if isinstance(rows, Tensor):
        return rows.to(device)
    return {name: tensor.to(device) for name, tensor in rows.items()}


def _taken(output: Any, take: Take) -> Any:
    if take is None:
        return output
    if not isinstance(take, str):
        return take(output)
    parts = nested.parts_of(output) or {}
    by_name = {str(key): part for key, part in parts.items()}
    if take in by_name:
        return by_name[take]
    there = f"; there are {', '.join(by_name)}" if by_name else " and has no parts"
    raise TrainingError(
        f"take={take!r}: the model returns a {type(output).__name__}{there}. Name one of its "
        "parts, or give a function of the output."
    )


def _named_leaves(output: Any, prefix: str = "") -> list[tuple[str, Any]]:
    parts = nested.parts_of(output)
    if parts is None:
        return [(prefix or "output", output)]
    found: list[tuple[str, Any]] = []
    for key, part in parts.items():
        found += _named_leaves(part, f"{prefix}.{key}" if prefix else str(key))
    return found


def _belongs_to_the_batch(leaf: Any) -> bool:
    is_number = isinstance(leaf, Tensor) and leaf.ndim == 0
    return is_number or leaf is None or isinstance(leaf, bool | int | float | str)


def _not_rows(name: str, value: Any, samples: int) -> str:
    found = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        found = f"a tensor of shape {tuple(value.shape)}"
    return (
        f"{name} is {found}, not a tensor with a row for each of the {samples} samples. Choose "
        "what to keep with take=: the name of a part of the output, such as 'logits', or a "
        "function of the output."
    )


def _cat(tensors: Sequence[Tensor], name: str, parts: int) -> Tensor:
    if parts == 1:
        return tensors[0]
    if len({tensor.shape[1:] for tensor in tensors}) > 1:
        shapes = sorted({tuple(tensor.shape[1:]) for tensor in tensors})
        raise TrainingError(
            f"{name}: rows have different shapes, {shapes[0]} and {shapes[-1]}, and cannot make "
            "one tensor. Pad all batches to one length, take= something of equal shape, or write "
            "them to a .jsonl file, which takes rows of any shape."
        )
    return torch.cat(list(tensors))


def by_name(rows: Rows) -> Mapping[str, Tensor]:
    """The tensors by name; a single one is ``output``."""
    return {"output": rows} if isinstance(rows, Tensor) else rows
