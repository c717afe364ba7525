"""Batches as users bring them: tensors, tuples, dicts, Hugging Face encodings, nested freely.

Everything here treats dimension 0 of each tensor, and the length of each list of plain values, as
the samples. Other leaves (numbers, strings, ``None``) belong to the whole batch and are passed on.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import DataError


def batch_size(batch: Any) -> int:
    """How many samples ``batch`` holds: the common length of dimension 0 of its tensors."""
    sizes: dict[int, str] = {}
    for path, leaf in _leaves(batch, "batch"):
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            sizes.setdefault(leaf.shape[0], f"{path} has shape {tuple(leaf.shape)}")
    if not sizes:
        raise DataError(
            f"cannot count the samples of a batch of type {type(batch).__name__}: it holds no "
            "tensor with a batch dimension. Return tensors from the dataset (or collate_fn), or "
            "pass count= to the engine."
        )
    if len(sizes) > 1:
        raise DataError(
            "cannot count the samples of a batch whose tensors disagree in dimension 0: "
            + "; ".join(sizes.values())
            + ". Put the samples first in every tensor, or pass count= to the engine."
        )
    return next(iter(sizes))


def split(batch: Any, most: int | None) -> list[Any]:
    """Cut ``batch`` along its samples into near-equal parts of at most ``most`` samples each."""
    samples = batch_size(batch)
    if most is None or samples <= most:
        return [batch]
    parts = -(-samples // most)
    base, extra = divmod(samples, parts)
    bounds = [0]
    for part in range(parts):
        bounds.append(bounds[-1] + base + (part < extra))
    return [narrow(batch, samples, a, b) for a, b in itertools.pairwise(bounds)]


def narrow(batch: Any, samples: int, start: int, stop: int) -> Any:
    """The samples ``start`` to ``stop`` of a batch of ``samples``; tensors are views."""

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf[start:stop] if leaf.ndim > 0 else leaf
        if isinstance(leaf, list) and len(leaf) == samples:
            return leaf[start:stop]
        return leaf

    return _map(batch, cut)


def placeholder(batch: Any) -> Any:
    """One sample of zeros, shaped like the samples of ``batch``, which may have none itself."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            return leaf.new_zeros((1, *leaf.shape[1:]))
        return leaf

    return _map(batch, one)


def move(batch: Any, device: torch.device, float_dtype: torch.dtype | None = None) -> Any:
    """``batch`` on ``device``; its floating-point tensors as ``float_dtype`` where one is given."""

    def to(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        dtype = float_dtype if leaf.is_floating_point() else None
        return leaf.to(device=device, dtype=dtype, non_blocking=True)

    return _map(batch, to)


def _map(batch: Any, change: Callable[[Any], Any]) -> Any:
    """``batch`` rebuilt with ``change`` applied to its leaves; the containers keep their types."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, MutableMapping):
        # A copy keeps what a plain dict would lose (Hugging Face's BatchEncoding, UserDict, ...).
        result = copy.copy(batch)
        for key, value in batch.items():
            result[key] = _map(value, change)
        return result
    if isinstance(batch, Mapping):
        return {key: _map(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple):
        values = [_map(value, change) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    if _is_nested_list(batch):
        return [_map(value, change) for value in batch]
    return change(batch)


def _leaves(batch: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _leaves(value, f"{path}[{key!r}]")
    elif isinstance(batch, tuple) or _is_nested_list(batch):
        for index, value in enumerate(batch):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        yield path, batch


def _is_nested_list(batch: Any) -> bool:
    """A list of tensors or containers is structure; any other list is one value a sample."""
    return isinstance(batch, list) and any(
        isinstance(value, Tensor | Mapping)
        or (isinstance(value, Sequence) and not isinstance(value, str | bytes))
        for value in batch
    )
