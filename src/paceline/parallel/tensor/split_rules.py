"""How a split travels through an operation: pure functions over shapes, for finding plans.

A ``Split`` says that a dimension of a tensor is cut into ``chunks`` equal chunks, each of
which is spread over the ranks. Rules answer with the split of the outputs, or raise
``NeedsWhole`` where the operation needs the dimension whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.torch_internals import operator_name

aten = torch.ops.aten


@dataclass(frozen=True)
class Split:
    """``units`` are, by origin, the sizes that have to divide by the number of ranks.

    ``shared`` are those among them that several others share, as queries do a head of keys:
    ``is_expanded`` says that the dimension behind the split one repeats values.
    """

    dim: int
    chunks: int
    origins: frozenset[str]
    units: frozenset[tuple[str, int]] = frozenset()
    shared: frozenset[tuple[str, int]] = frozenset()
    is_expanded: bool = False

    def at(self, dim: int) -> Split:
        """The same split, elsewhere."""
        return replace(self, dim=dim)

    def with_unit(self, unit: int) -> Split:
        """The same split, of that many units."""
        return replace(self, units=self.units | {(name, unit) for name in self.origins})

    def sharing(self, heads: int) -> Split:
        """The same split, each of its ``heads`` shared by several others."""
        return replace(self, shared=self.shared | {(name, heads) for name in self.origins})

    def joined(self, other: Split) -> Split:
        """What comes of both, split where this one is."""
        return replace(
            self,
            origins=self.origins | other.origins,
            units=self.units | other.units,
            shared=self.shared | other.shared,
        )


class NeedsWhole(Exception):
    """An operation that needs the dimension whole; ``pieces`` if packing in that many would do."""

    def __init__(self, pieces: int | None = None) -> None:
        super().__init__()
        self.pieces = pieces


Rule = Callable[[tuple[Any, ...], dict[str, Any], list["Split | None"], Any], Any]
"""``(args, kwargs, splits of args, output) -> split of the output``, or a list of splits."""


def reshaped(split: Split, before: Sequence[int], after: Sequence[int]) -> Split:
    """A view: the cut falls into the dimension that begins where the chunks are counted out."""
    blocks = math.prod(before[: split.dim]) * split.chunks
    outer = 1
    for dim, size in enumerate(after):
        if outer * size > blocks:
            if blocks % outer or size % (blocks // outer):
                raise NeedsWhole
            chunks = blocks // outer
            heads, unit = before[split.dim] // split.chunks, size // chunks
            if split.is_expanded and unit > heads:  # each head written out for those that share it
                split = split.sharing(heads)
            return replace(split, dim=dim, chunks=chunks, is_expanded=False).with_unit(unit)
        outer *= size
    raise NeedsWhole


def _view(args: Any, kwargs: Any, splits: list[Split | None], out: Any) -> Split:
    assert splits[0] is not None
    return reshaped(splits[0], args[0].shape, out.shape)


def pointwise(args: Any, kwargs: Any, splits: list[Split | None], out: Any) -> Split:
    """Elementwise with broadcasting: all that is split must be split alike."""
    result = first_tensor(out)
    found: Split | None = None
    for value, split in zip(args, splits, strict=True):
        if split is None:
            continue
        here = split.at(split.dim + result.ndim - value.ndim)
        if result.shape[here.dim] != value.shape[split.dim]:
            raise NeedsWhole  # a split dimension of length one that is broadcast
        if found is None:
            found = here
        elif (found.dim, found.chunks) != (here.dim, here.chunks):
            raise NeedsWhole
        else:
            found = found.joined(here)
    assert found is not None
    return found


def _permute(args: Any, kwargs: Any, splits: list[Split | None], out: Any) -> Split:
    assert splits[0] is not None
    dims = [d % out.ndim for d in args[1]]
    return splits[0].at(dims.index(splits[0].dim))


def _transpose(args: Any, kwargs: Any, splits: list[Split | None], out: Any) -> Split:
    assert splits[0] is not None
    a, b = (d % out.ndim for d in (args[1:3] if len(args) > 2 else (0, 1)))
    return splits[0].at({a: b, b: a}.get(splits[0].dim, splits[0].dim))


def _t(args: Any, kwargs: Any, splits: list[Split | None], out: Any) -> Split:
    assert splits[0] is not None
    return splits[0].at(out.ndim - 1 - splits[0].dim)


def _expand(args: Any, kwargs: Any, splits: list[Split | None], out: Any) -> Split:
    split = splits[0]
    assert split is not None
    moved = split.at(split.dim + out.ndim - args[0].ndim)
    last = split.dim == args[0].ndim - 1
    if not last and args[0].shape[split.dim + 1] == 1 < out.shape[moved.dim + 1]:
        return replace(moved, is_expanded=True)
    return moved


def _unsqueeze(args: Any, kwargs: Any, splits: list[Split | None], out: Any) -> Split:
    assert splits[0] is not None
    dim = args[1] % out.ndim
    return splits[0].at(splits[0].dim + (dim <= splits[0].dim))


def _squeeze(args: Any, kwargs: Any, splits: list[Split | None], out: Any) -> Split:
    assert splits[0] is not None
    return reshaped(splits[0], args[0].shape, out.shape)


def _select(args: Any, kwargs: Any, splits: list[Split | None], out: Any) -> Split:
    split = splits[0]
    assert split is not None
    dim = args[1] % args[0].ndim
    if dim == split.dim:
        raise NeedsWhole(args[0].shape[dim] if split.chunks == 1 else None)
    return split.at(split.dim - (dim < split.dim))


def _unbind(args: Any, kwargs: Any, splits: list[Split | None], out: Any) -> list[Split]:
    split = splits[0]
    assert split is not None
    dim = (args[1] if len(args) > 1 else 0) % args[0].ndim
    if dim == split.dim:
        raise NeedsWhole(args[0].shape[dim] if split.chunks == 1 else None)
    return [split.at(split.dim - (dim < split.dim)) for _ in out]


def _slice(args: Any, kwargs: Any, splits: list[Split | None], out: Any) -> Split:
    split = splits[0]
    assert split is not None
    dim = (args[1] if len(args) > 1 else 0) % args[0].ndim
    before, after = args[0].shape[dim], out.shape[dim]
    if dim != split.dim or before == after:
        return split
    start = args[2] if len(args) > 2 and args[2] is not None else 0
    step = args[4] if len(args) > 4 else 1
    return _piece(split, before, start % before if before else 0, after, step)


def _piece(split: Split, size: int, start: int, length: int, step: int = 1) -> Split:
    """A part of the split dimension: whole chunks of it, or not at all."""
    unit = size // split.chunks
    if step == 1 and length and start % unit == 0 and length % unit == 0:
        return replace(split, chunks=length // unit)
    fits = step == 1 and length and size % length == 0 and start % length == 0
    raise NeedsWhole(size // length if fits and split.chunks == 1 else None)


def _split(args: Any, kwargs: Any, splits: list[Split | None], out: Any) -> list[Split]:
    split = splits[0]
    assert split is not None
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % args[0].ndim
    if dim != split.dim:
        return [split for _ in out]
    made, start = [], 0
    for piece in out:
        made.append(_piece(split, args[0].shape[dim], start, piece.shape[dim]))
        start += piece.shape[dim]
    return made


def _softmax(args: Any, kwargs: Any, splits: list[Split | None], out: Any) -> Split:
    assert splits[0] is not None
    if args[1] % args[0].ndim == splits[0].dim:
        raise NeedsWhole
    return splits[0]


def _reduce(args: Any, kwargs: Any, splits: list[Split | None], out: Any) -> Any:
    split = splits[0]
    assert split is not None
    rank = args[0].ndim
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    if dims is None or isinstance(dims, bool | float):
        raise NeedsWhole
    dims = {d % rank for d in ([dims] if isinstance(dims, int) else dims)} or set(range(rank))
    if split.dim in dims:
        raise NeedsWhole
    result = first_tensor(out)
    kept = split if result.ndim == rank else split.at(split.dim - sum(d < split.dim for d in dims))
    return [kept for _ in out] if isinstance(out, tuple | list) else kept


def _layer_norm(args: Any, kwargs: Any, splits: list[Split | None], out: Any) -> list[Any]:
    split = splits[0]
    if split is None or split.dim >= args[0].ndim - len(args[1]):
        raise NeedsWhole
    return [split, *(None for _ in out[1:])] if isinstance(out, tuple | list) else [split]


def _cat(args: Any, kwargs: Any, splits: list[Split | None], out: Any) -> Split:
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
    found = pointwise(args[0], kwargs, kwargs["_listed"], out)
    if found.dim == dim:
        raise NeedsWhole
    return found


def _stack(args: Any, kwargs: Any, splits: list[Split | None], out: Any) -> Split:
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
    found = pointwise(args[0], kwargs, kwargs["_listed"], args[0][0])
    return found.at(found.dim + (dim <= found.dim))


def _mm(args: Any, kwargs: Any, splits: list[Split | None], out: Any) -> Split:
    """Products of activations; ``addmm`` and ``baddbmm`` come here without their first argument."""
    a, b = splits[-2:]
    rank = out.ndim
    batch = [s for s in (a, b) if s is not None and s.dim < rank - 2]
    if batch and len(batch) == sum(s is not None for s in (a, b)):
        return pointwise(args[-2:], kwargs, [a, b], out)
    if a is not None and b is None and a.dim == rank - 2:
        return a
    if b is not None and a is None and b.dim == rank - 1:
        return b
    raise NeedsWhole


def _glu(args: Any, kwargs: Any, splits: list[Split | None], out: Any) -> Split:
    split = splits[0]
    assert split is not None
    dim = (args[1] if len(args) > 1 else -1) % args[0].ndim
    if dim != split.dim:
        return split
    if split.chunks != 2:
        raise NeedsWhole(2 if split.chunks == 1 else None)
    return replace(split, chunks=1)


def first_tensor(out: Any) -> Tensor:
    """The output, or the first of several."""
    return out if isinstance(out, Tensor) else next(t for t in out if isinstance(t, Tensor))


_REDUCTIONS: tuple[str, ...] = (
    "sum",
    "mean",
    "amax",
    "amin",
    "var",
    "std",
    "var_mean",
    "max",
    "min",
    "argmax",
)
_REDUCTIONS += ("argmin", "any", "all", "norm", "linalg_vector_norm", "logsumexp", "prod")
_COPIES: tuple[str, ...] = (
    "clone",
    "_to_copy",
    "detach",
    "alias",
    "lift_fresh",
    "contiguous",
    "native_dropout",
)
_COPIES += ("bernoulli", "bernoulli_", "rand_like", "zeros_like", "ones_like", "empty_like")
_COPIES += ("full_like", "fill_", "copy_", "copy", "detach_", "where", "masked_fill")
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten"), _view),
    **dict.fromkeys(_COPIES, pointwise),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys(("_softmax", "_log_softmax", "cumsum", "_safe_softmax"), _softmax),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    **dict.fromkeys(("mm", "bmm"), _mm),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "rms_norm"), _layer_norm),
    "permute": _permute,
    "transpose": _transpose,
    "t": _t,
    "expand": _expand,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "select": _select,
    "unbind": _unbind,
    "slice": _slice,
    "cat": _cat,
    "stack": _stack,
    "glu": _glu,
}


def rule_for(func: Any) -> Rule | None:
    """The rule of an operator; ``None`` when nothing is known of it."""
    name = operator_name(func)
    found = _RULES.get(name)
    if found is None and torch.Tag.pointwise in func.tags:
        return pointwise
    return found
