"""Batches of any structure: an empty one, and a slice of a ready-made one.

A batch may be a tensor, an array, or tensors in tuples, lists, named tuples, dicts, dict-like
objects such as Hugging Face's ``BatchEncoding``, and dataclasses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import DataError
from paceline.nested import parts_of, with_parts

_SCALARS = (str, bytes, int, float, complex, bool, type(None))


def empty_batch(make: Callable[[int], Any]) -> Any:
    """A batch of zero samples with the structure of ``make(1)``.

    ``make(count)`` collates the same sample ``count`` times. What differs between a batch of one
    and a batch of two is what counts samples, wherever a collate function puts it: that dimension
    becomes 0, that list becomes empty. The rest is kept.
    """
    one, two = make(1), make(2)
    shrink = _Shrink()
    result = shrink(one, two, "the batch")
    if not shrink.found:
        raise DataError(
            f"collate_fn gave the same {type(one).__name__} for one sample and for two, so a rank "
            "without samples cannot be given an empty batch. Let collate_fn return tensors with a "
            "dimension that counts samples, or set global_batch to at least the number of ranks."
        )
    return result


class _Shrink:
    def __init__(self) -> None:
        self.found = False

    def __call__(self, one: Any, two: Any, where: str) -> Any:
        if type(one) is not type(two):
            raise DataError(_not_understood(where, f"{type(one).__name__} or {type(two).__name__}"))
        if _is_array(one):
            return self._array(one, two, where)
        if isinstance(one, _SCALARS):
            return self._scalar(one, two)
        if isinstance(one, list | tuple) and not hasattr(one, "_fields") and len(one) != len(two):
            self.found = True
            return type(one)()
        parts, rebuild = _open(one, where)
        others, _ = _open(two, where)
        if parts.keys() != others.keys():
            raise DataError(_not_understood(where, "a structure that depends on the batch size"))
        return rebuild({k: self(parts[k], others[k], f"{where}[{k!r}]") for k in parts})

    def _array(self, one: Any, two: Any, where: str) -> Any:
        if one.ndim != two.ndim:
            raise DataError(_not_understood(where, f"{one.ndim} or {two.ndim} dimensions"))
        if one.ndim == 0:
            return 2 * one - two if one.dtype is not torch.bool else one
        grows = [a != b for a, b in zip(one.shape, two.shape, strict=True)]
        self.found |= any(grows)
        return one[tuple(slice(0, 0) if grow else slice(None) for grow in grows)]

    def _scalar(self, one: Any, two: Any) -> Any:
        """A count or a sum (of tokens, say) comes to what it is for no samples; a mean stays."""
        if isinstance(one, int | float) and not isinstance(one, bool) and one != two:
            return 2 * one - two
        return one


def count_rows(batch: Any) -> int:
    """How many samples a ready-made batch holds: the first dimension of its first tensor."""
    rows = _first_rows(batch, "the batch")
    if rows is None and isinstance(batch, list):
        return len(batch)
    if rows is None:
        raise DataError(
            f"the DataLoader has batch_size=None and gave a {type(batch).__name__} without a "
            "tensor in it, so Paceline cannot tell its samples apart. Give the DataLoader a "
            "batch_size."
        )
    return rows


def cut_rows(batch: Any, start: int, stop: int) -> Any:
    """Samples ``start`` to ``stop`` of a ready-made batch whose tensors count samples first."""
    rows = count_rows(batch)
    if isinstance(batch, list) and _first_rows(batch, "the batch") is None:
        return batch[start:stop]
    return _cut(batch, start, stop, rows, "the batch")


def _cut(value: Any, start: int, stop: int, rows: int, where: str) -> Any:
    if _is_array(value):
        if value.ndim == 0:
            return value
        if value.shape[0] != rows:
            raise DataError(
                f"{where} has {value.shape[0]} as its first dimension where other parts have "
                f"{rows}, so the batch cannot be cut into shares. Give the DataLoader a batch_size "
                "and let its dataset return single samples."
            )
        return value[start:stop]
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, list | tuple) and all(isinstance(item, _SCALARS) for item in value):
        return value[start:stop] if len(value) == rows else value
    parts, rebuild = _open(value, where)
    return rebuild({k: _cut(v, start, stop, rows, f"{where}[{k!r}]") for k, v in parts.items()})


def _first_rows(value: Any, where: str) -> int | None:
    if _is_array(value):
        return int(value.shape[0]) if value.ndim else None
    if isinstance(value, _SCALARS):
        return None
    for key, part in _open(value, where)[0].items():
        if (rows := _first_rows(part, f"{where}[{key!r}]")) is not None:
            return rows
    return None


def _open(value: Any, where: str) -> tuple[dict[Any, Any], Callable[[dict[Any, Any]], Any]]:
    """The parts of a container by name, and how to build one like it from other parts."""
    parts = parts_of(value)
    if parts is None:
        kind = f"a {type(value).__module__}.{type(value).__name__}"
        raise DataError(_not_understood(where, kind))
    return parts, lambda others: with_parts(value, others)


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (
        type(value).__module__ == "numpy" and hasattr(value, "ndim")
    )


def _not_understood(where: str, found: str) -> str:
    return (
        f"{where} is {found}: Paceline cannot cut that into shares. Use tensors, tuples, lists, "
        "dicts or dataclasses of them, or set global_batch to at least the number of ranks."
    )
