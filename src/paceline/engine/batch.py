"""Batches as users bring them: tensors, tuples, dicts, dataclasses, Hugging Face encodings, nested.

Everything here treats dimension 0 of each tensor or array, and the length of each list without
tensors, as the samples. Other leaves (numbers, strings, ``None``) belong to the whole batch and are
passed on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

import paceline.nested as nested
from paceline.data import share
from paceline.errors import DataError


def batch_size(batch: Any) -> int:
    """How many samples ``batch`` holds: the common length of dimension 0 of its tensors."""
    sizes: dict[int, str] = {}
    for path, leaf in nested.named_leaves(batch, "batch", is_leaf=_is_leaf):
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
    if most is None:
        return [batch]
    samples = batch_size(batch)
    if samples <= most:
        return [batch]
    return split_into(batch, -(-samples // most))


def split_into(batch: Any, parts: int) -> list[Any]:
    """Cut ``batch`` along its samples into ``parts`` near-equal parts."""
    samples = batch_size(batch)
    return [narrow(batch, samples, *share(samples, part, parts)) for part in range(parts)]


def narrow(batch: Any, samples: int, start: int, stop: int) -> Any:
    """The samples ``start`` to ``stop`` of a batch of ``samples``; tensors are views."""

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_sparse:
            return leaf.narrow_copy(0, start, stop - start)
        if isinstance(leaf, Tensor):
            return leaf[start:stop] if leaf.ndim > 0 else leaf
        if hasattr(leaf, "to"):
            raise DataError(
                f"cannot cut a {type(leaf).__name__} into microbatches. Leave microbatch out, or "
                "put tensors into the batch."
            )
        if isinstance(leaf, list | tuple) or getattr(leaf, "ndim", 0) > 0:
            return leaf[start:stop] if len(leaf) == samples else leaf
        return leaf

    return map_leaves(batch, cut)


def placeholder(batch: Any) -> Any:
    """One sample of zeros, shaped like the samples of ``batch``, which may have none itself."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            return leaf.new_zeros((1, *leaf.shape[1:]))
        return leaf

    return map_leaves(batch, one)


def move(batch: Any, device: torch.device, float_dtype: torch.dtype | None = None) -> Any:
    """``batch`` on ``device``; its floating-point tensors as ``float_dtype`` where one is given."""

    def to(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf.to(device) if hasattr(leaf, "to") else leaf
        dtype = float_dtype if leaf.is_floating_point() else None
        return leaf.to(device=device, dtype=dtype, non_blocking=True)

    return map_leaves(batch, to)


def map_leaves(batch: Any, change: Callable[[Any], Any]) -> Any:
    """``batch`` rebuilt with ``change`` applied to its leaves; the containers keep their types."""
    return nested.map_leaves(batch, change, is_leaf=_is_leaf, fresh=True)


def _is_leaf(value: Any) -> bool:
    """Whether not to look inside: a list or tuple without a tensor in it is one value a sample."""
    if _is_packed(value):
        return True
    if not isinstance(value, tuple | list) or hasattr(value, "_fields"):
        return False
    found = nested.leaves(list(value), is_leaf=_is_packed)
    return not any(isinstance(leaf, Tensor) or hasattr(leaf, "to") for leaf in found)


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)
