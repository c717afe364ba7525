"""How two checkpoints differ: tensor by tensor, value by value, whatever layouts they are of."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.checkpoint import Checkpoint
from paceline.checkpoint.manifest import Manifest, TensorEntry

_CHUNK = 1 << 20
"""Elements compared at a time: what is computed on the way takes a few dozen bytes for each."""
_EXACT = 2.0**53
"""Up to here float64 tells whole numbers apart."""
_WORDS = 60
CLOCKS = frozenset({"loop/epoch_seconds"})
"""Values that are seconds on a clock: no two runs have the same, so that they are reported and not
counted."""

ONLY_A, ONLY_B = "only in A", "only in B"
_ORDER = (ONLY_A, ONLY_B, "shape", "dtype", "values")


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is not bitwise-identical.

    ``kind`` is ``only in A``, ``only in B``, ``shape``, ``dtype`` or ``values``; ``a`` and ``b``
    say dtype and shape. ``elements`` of them differ, at most by ``absolute``, and by ``relative``
    to the larger of the two values. Infinite: a number against NaN or infinity. ``None``: values
    that cannot be compared.
    """

    name: str
    kind: str
    a: str = ""
    b: str = ""
    elements: int = 0
    absolute: float | None = None
    relative: float | None = None


@dataclass(frozen=True)
class ObjectDifference:
    """A value somewhere in an object that differs; ``a`` and ``b`` are shortened texts of it."""

    name: str
    a: str
    b: str


@dataclass
class Difference:
    """All that differs, the most different first, and how much does not."""

    tensors: list[TensorDifference] = field(default_factory=list)
    objects: list[ObjectDifference] = field(default_factory=list)
    equal_tensors: int = 0
    equal_objects: int = 0
    clocks: list[ObjectDifference] = field(default_factory=list)
    """Seconds that differ (``CLOCKS``), which is no difference between two runs."""

    @property
    def equal(self) -> bool:
        """Whether every tensor and every object is bitwise-identical, but for clocks."""
        return not self.tensors and not self.objects


def diff_checkpoints(
    a: Checkpoint,
    b: Checkpoint,
    *,
    only: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
) -> Difference:
    """Compare two checkpoints. Their layouts, their steps and their infos may differ.

    ``only``: patterns such as ``model/*``; what matches none is left out. Every byte is checked
    against its hash on the way. At most two tensors are in memory at a time. ``progress`` is
    called with the bytes read since the last call (``bytes_to_read`` in all).
    """
    with ExitStack() as stack:
        for one in {id(a): a, id(b): b}.values():
            stack.enter_context(one.kept_open())
        return _diff(a, b, only, progress or (lambda count: None))


def _diff(
    a: Checkpoint, b: Checkpoint, only: Sequence[str], progress: Callable[[int], None]
) -> Difference:
    result = Difference()
    for name in _chosen({**a.manifest.tensors, **b.manifest.tensors}, only):
        found = _compare_tensor(name, a, b)
        progress(sum(_length(one.manifest, name) for one in (a, b)))
        if found is None:
            result.equal_tensors += 1
        else:
            result.tensors.append(found)
    for name in _chosen({**a.manifest.objects, **b.manifest.objects}, only):
        found_here = list(_compare_object(name, a, b))
        differences = [one for one in found_here if one.name not in CLOCKS]
        result.clocks += [one for one in found_here if one.name in CLOCKS]
        result.objects += differences
        result.equal_objects += not differences
    result.tensors.sort(key=lambda one: (_ORDER.index(one.kind), -(one.absolute or 0.0)))
    return result


def bytes_to_read(a: Checkpoint, b: Checkpoint, only: Sequence[str] = ()) -> int:
    """How many bytes of tensors ``diff_checkpoints`` will go through."""
    names = _chosen({**a.manifest.tensors, **b.manifest.tensors}, only)
    return sum(_length(one.manifest, name) for one in (a, b) for name in names)


def _chosen(names: dict[str, Any], only: Sequence[str]) -> list[str]:
    return [n for n in names if not only or any(fnmatch.fnmatchcase(n, p) for p in only)]


def _length(manifest: Manifest, name: str) -> int:
    entry = manifest.tensors.get(name)
    return 0 if entry is None else sum(stored.length for stored in entry.stored)


def _compare_tensor(name: str, a: Checkpoint, b: Checkpoint) -> TensorDifference | None:
    in_a, in_b = a.manifest.tensors.get(name), b.manifest.tensors.get(name)
    words = _describe(in_a), _describe(in_b)
    if in_a is None or in_b is None:
        return TensorDifference(name, ONLY_A if in_b is None else ONLY_B, *words)
    if in_a.shape != in_b.shape:
        return TensorDifference(name, "shape", *words)
    kind = "values" if in_a.dtype == in_b.dtype else "dtype"
    elements, absolute, relative = compare(a.read_tensor(name), b.read_tensor(name))
    if elements == 0 and kind == "values":
        return None
    return TensorDifference(name, kind, *words, elements, absolute, relative)


def compare(a: Tensor, b: Tensor) -> tuple[int, float | None, float | None]:
    """How many elements differ, and the largest absolute and relative difference of any.

    Both of one shape. Of one dtype they are compared bit by bit, else by value; the differences
    are ``None`` where the dtype does not convert to numbers.
    """
    elements, absolute, relative = 0, 0.0, 0.0
    comparable = True
    a, b = a.reshape(-1), b.reshape(-1)
    for start in range(0, a.numel(), _CHUNK):
        x, y = a[start : start + _CHUNK], b[start : start + _CHUNK]
        if x.dtype == y.dtype:
            differs = _bits_differ(x, y)
            if differs is None:
                continue
            elements += int(differs.sum())
            x, y = _picked(x, differs), _picked(y, differs)
        numbers = _numbers(x), _numbers(y)
        if numbers[0] is None or numbers[1] is None:
            comparable = False
            continue
        if x.dtype != y.dtype:
            elements += int((numbers[0] != numbers[1]).sum())
        largest = _largest(x, y, numbers[0], numbers[1])
        absolute, relative = max(absolute, largest[0]), max(relative, largest[1])
    return (elements, absolute, relative) if comparable else (elements, None, None)


def _bits_differ(x: Tensor, y: Tensor) -> Tensor | None:
    """Which elements differ in any bit; ``None`` where none does."""
    raw_x, raw_y = x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)
    if torch.equal(raw_x, raw_y):
        return None
    return (raw_x != raw_y).view(-1, x.element_size()).any(dim=1)


def _picked(values: Tensor, mask: Tensor) -> Tensor:
    """The elements under ``mask``; by their bytes, since some dtypes know no indexing."""
    raw = values.contiguous().view(torch.uint8).view(-1, values.element_size())
    return raw[mask].reshape(-1).view(values.dtype)


def _numbers(values: Tensor) -> Tensor | None:
    """In double precision; ``None`` for a dtype that has no numbers torch could convert."""
    try:
        return values.to(torch.complex128 if values.is_complex() else torch.float64)
    except (RuntimeError, NotImplementedError):
        return None


def _largest(x: Tensor, y: Tensor, as_x: Tensor, as_y: Tensor) -> tuple[float, float]:
    """The largest absolute and relative difference of two chunks that are not both empty."""
    if x.numel() == 0:
        return 0.0, 0.0
    distance = (as_x - as_y).abs()
    if _is_whole(x) and _is_whole(y):
        # Nearby large whole numbers fall together in float64; their difference does not.
        exact = (x.to(torch.int64) - y.to(torch.int64)).abs().to(torch.float64)
        distance = torch.where(distance < _EXACT, exact, distance)
    # Two NaNs of different bits, and an infinity against itself, are as near as can be.
    same = distance.isnan() & ((as_x == as_y) | (as_x.isnan() & as_y.isnan()))
    distance = distance.masked_fill(same, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
    larger = torch.maximum(as_x.abs(), as_y.abs())
    ratio = torch.where(distance == 0, distance, distance / larger)
    ratio = ratio.nan_to_num(nan=math.inf, posinf=math.inf)
    return float(distance.max()), float(ratio.max())


def _is_whole(values: Tensor) -> bool:
    return not values.is_floating_point() and not values.is_complex()


def _compare_object(name: str, a: Checkpoint, b: Checkpoint) -> Iterator[ObjectDifference]:
    in_a, in_b = name in a.manifest.objects, name in b.manifest.objects
    if in_a and in_b:
        yield from _compare_values(name, a.read_object(name), b.read_object(name))
    else:
        one = a if in_a else b
        text = _short(one.read_object(name))
        yield ObjectDifference(name, text if in_a else "", "" if in_a else text)


def _compare_values(path: str, a: Any, b: Any) -> Iterator[ObjectDifference]:
    """What differs in two nested values; the path to each, as ``loop/best``."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            below = f"{path}/{key}"
            if key in a and key in b:
                yield from _compare_values(below, a[key], b[key])
            else:
                yield ObjectDifference(
                    below, _short(a[key]) if key in a else "", _short(b[key]) if key in b else ""
                )
    elif isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _compare_values(f"{path}/{index}", x, y)
    elif not _same(a, b):
        yield ObjectDifference(path, _short(a), _short(b))


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and compare(a, b)[0] == 0
    if isinstance(a, float) and math.isnan(a) and math.isnan(b):
        return True
    return bool(a == b)


def _describe(entry: TensorEntry | None) -> str:
    return "" if entry is None else f"{entry.dtype} [{', '.join(map(str, entry.shape))}]"


def _short(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() > 4:
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= _WORDS else f"{text[: _WORDS - 1]}…"
