"""The context in which models with split layers run: plain and split tensors meet in it.

Between a column-parallel and a row-parallel layer activations are DTensors of global shape, so the
model's own code runs unchanged. What DTensor cannot do by itself is done here: plain tensors that
meet a DTensor are wrapped (their gradients come back summed over the ranks), attention runs on each
rank's own heads, packed outputs are taken apart, the cross-entropy of a split vocabulary is
computed in parts, and what has no split form is computed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import paceline.parallel.tensor.packed_qkv as packed
from paceline.errors import LayoutError
from paceline.nested import map_tensors, tensors
from paceline.parallel.tensor.attention import split_attention
from paceline.parallel.tensor.dropout import draw_part, split_dropout
from paceline.parallel.tensor.linear import split_linear
from paceline.parallel.tensor.multihead_attention import split_multi_head_attention
from paceline.parallel.tensor.shards import (
    are_logits,
    as_split,
    gathered,
    is_packed,
    is_shared,
    mark_logits,
    on_mesh,
    placement,
    plain,
    replicated,
    split_of,
    wrap,
)
from paceline.parallel.tensor.split_forms import SplitForms
from paceline.parallel.tensor.vocabulary import split_cross_entropy, split_embedding
from paceline.randomness import DRAWN_BY_ELEMENT, active


def mixing(mesh: DeviceMesh, forms: SplitForms | None = None) -> TorchFunctionMode:
    """The context for forward passes of a model split over ``mesh`` (one-dimensional).

    Recomputation of activations needs it too. Backward passes do not. ``forms`` keeps what was
    decided about calls from one forward to the next, and says which were computed whole.
    """
    if forms is None:  # as long as the mesh, which all ranks make and drop together
        forms = getattr(mesh, "_paceline_split_forms", None) or SplitForms()
        mesh._paceline_split_forms = forms  # type: ignore[attr-defined]
    return _Mixing(mesh, forms)


# Asked of the tensor itself, not of its values; FSDP2's hooks, which run in here too, do so.
_ABOUT_THE_OBJECT = (
    *("__get__", "__set__", "size", "dim", "stride", "numel", "is_contiguous", "element_size"),
    *("detach", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
    *("is_floating_point", "to_local", "untyped_storage", "data_ptr", "record_stream"),
)


class _Mixing(TorchFunctionMode):
    def __init__(self, mesh: DeviceMesh, forms: SplitForms) -> None:
        super().__init__()
        self.mesh, self.forms = mesh, forms

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        split = [
            t
            for t in tensors((args, kwargs))
            if isinstance(t, DTensor) and (t.device_mesh == self.mesh or is_shared(t))
        ]
        if not split or getattr(func, "__name__", "") in _ABOUT_THE_OBJECT:
            return func(*args, **kwargs)
        mesh = split[0].device_mesh
        if any(t.device_mesh != mesh for t in split) and func not in _MIXES_MESHES:
            mesh = self.mesh
            args, kwargs = (map_tensors(v, lambda t: on_mesh(t, mesh)) for v in (args, kwargs))
            split = [t for t in tensors((args, kwargs)) if isinstance(t, DTensor)]
        randomness = active()
        if randomness is not None and func in DRAWN_BY_ELEMENT:
            return draw_part(randomness, func, args, kwargs)
        special = _SPECIAL.get(func)
        if special is not None:
            result = special(mesh if func not in _MIXES_MESHES else self.mesh, func, args, kwargs)
            if result is not NotImplemented:
                return result
        if any(is_packed(t) for t in split):
            return _packed(func, args, kwargs)
        logits = any(are_logits(t) for t in split)
        if func in _LOOKS_AT_VALUES or (logits and func not in _KEEPS_CLASSES):
            return _whole(func, args, kwargs)
        if _works_in_place(func) and not isinstance(args[0], DTensor):
            # The caller goes on using the plain tensor that is changed.
            return _whole(func, args, kwargs)
        result = self._split_or_whole(mesh, func, args, kwargs)
        return mark_logits(result) if logits else result

    def _split_or_whole(
        self, mesh: DeviceMesh, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        def wrapped(value: Any) -> Any:
            return map_tensors(value, lambda t: replicated(t, mesh))

        args_on_mesh, kwargs_on_mesh = wrapped(args), wrapped(kwargs)
        if not self.forms.has(func, args_on_mesh, kwargs_on_mesh, self.mesh):
            return _whole(func, args, kwargs)
        return func(*args_on_mesh, **kwargs_on_mesh)


def _whole(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``func`` on whole, plain tensors; what it changes in place is split again."""
    if not _works_in_place(func) or not isinstance(args[0], DTensor):
        return func(*plain(args), **plain(kwargs))
    target, *others = args
    if is_packed(target):
        raise LayoutError(
            f"tensor parallel: {func.__name__} changes a packed output in place before it is taken "
            "apart. Change a copy, or leave the layer whole with a plan that says 'replicate'."
        )
    mesh = target.device_mesh
    whole = gathered(target).clone()
    result = func(whole, *plain(others), **plain(kwargs))
    target.copy_(replicated(whole, mesh).redistribute(mesh, target.placements))
    return target if result is whole else result


def _works_in_place(func: Any) -> bool:
    """Whether ``func`` changes its first argument, going by torch's way of naming."""
    name = getattr(func, "__name__", "")
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return bool(name.endswith("_"))


_NOT_IN_PLACE = ("__invert__", "__index__", "__int__")


def _packed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x, *others = args
    if isinstance(x, DTensor) and is_packed(x) and func in _PER_ELEMENT:
        y = func(x.to_local(), *others, **kwargs)
        return wrap(y, x.device_mesh, x.placements[-1], x.shape)
    return _whole(func, args, kwargs)


# ---- functions with a split form of their own: (mesh, func, args, kwargs) -> result, or
# NotImplemented for the general way ----


def _linear(mesh: DeviceMesh, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    def call(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        if not isinstance(weight, DTensor) or split_of(weight) is None or weight.ndim != 2:
            return NotImplemented
        # Outside a module of the plan: an output layer that borrows an embedding's weight.
        return mark_logits(split_linear(input, weight, bias))

    return call(*args, **kwargs)


def _embedding(mesh: DeviceMesh, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    def call(
        input: Tensor, weight: Tensor, padding_idx: int | None = None, *rest: Any, **more: Any
    ) -> Any:
        plain_call = not any(rest[:1]) and not any(rest[2:]) and not _any_option(more)
        if not plain_call or not isinstance(weight, DTensor) or split_of(weight) != (0, 1):
            return NotImplemented
        return split_embedding(input, weight, padding_idx)

    return call(*args, **kwargs)


def _any_option(more: dict[str, Any]) -> bool:
    return any(more.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse"))


def _attention(mesh: DeviceMesh, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return split_attention(mesh, *args, **kwargs)


def _multi_head(mesh: DeviceMesh, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return split_multi_head_attention(mesh, *args, **kwargs)


def _dropout(mesh: DeviceMesh, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    def call(input: DTensor, *rest: Any, **more: Any) -> Any:
        rest = rest[:2]  # the third is inplace
        return split_dropout(mesh, func, input, *rest, **more)

    return call(*args, **kwargs)


def _cross_entropy(mesh: DeviceMesh, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    def call(
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        classes = 0 if input.ndim == 1 else 1
        numbers = not target.is_floating_point()
        simple = weight is None and size_average is None and reduce is None and numbers
        if not simple or not isinstance(input, DTensor) or split_of(input) != (classes, 1):
            return func(*plain(args), **plain(kwargs))
        return split_cross_entropy(
            input,
            target,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )

    return call(*args, **kwargs)


def _matmul(mesh: DeviceMesh, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Batched products, such as attention written out, split along a batch-like dimension."""
    if len(args) != 2 or kwargs or min(args[0].ndim, args[1].ndim) < 3:
        return NotImplemented
    found = next((split_of(t) for t in args if isinstance(t, DTensor) and split_of(t)), None)
    first = next((t for t in args if isinstance(t, DTensor) and split_of(t)), None)
    if found is None or first is None or found[1] != 1:
        return NotImplemented
    dim = found[0] - first.ndim
    if dim >= -2 or any(-dim > t.ndim or t.shape[dim] != first.shape[dim] for t in args):
        return NotImplemented
    local = [as_split(t, mesh, dim).to_local() for t in args]
    y = func(*local)
    shape = (*torch.broadcast_shapes(*(t.shape[:-2] for t in args)), *y.shape[-2:])
    return wrap(y, mesh, placement(y.ndim + dim), torch.Size(shape))


def _einsum(mesh: DeviceMesh, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``einsum("bhqd,bhkd->bhqk", ...)`` along a letter of all operands and the result."""
    if not args or not isinstance(args[0], str) or "->" not in args[0] or "." in args[0]:
        return NotImplemented
    left, result = args[0].replace(" ", "").split("->")
    letters = left.split(",")
    operands = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    for term, operand in zip(letters, operands, strict=False):
        found = split_of(operand) if isinstance(operand, DTensor) else None
        if found is None:
            continue
        letter = term[found[0]]
        if found[1] != 1 or letter not in result or any(letter not in t for t in letters):
            return NotImplemented
        local = [
            as_split(o, mesh, t.index(letter)).to_local()
            for t, o in zip(letters, operands, strict=True)
        ]
        y = func(args[0], *local)
        shape = list(y.shape)
        shape[result.index(letter)] = operand.shape[found[0]]
        return wrap(y, mesh, placement(result.index(letter)), torch.Size(shape))
    return NotImplemented


def _cat(mesh: DeviceMesh, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """torch passes over empty one-dimensional tensors, as caches begin with; DTensor does not."""
    tensors, *rest = args if args else (kwargs.pop("tensors"),)
    rank = max(t.ndim for t in tensors)
    kept = [t for t in tensors if not (t.ndim == 1 < rank and t.numel() == 0)]
    if len(kept) == len(tensors) or any(is_packed(t) for t in kept if isinstance(t, DTensor)):
        return NotImplemented
    return func([replicated(t, mesh) for t in kept], *rest, **kwargs)


def _glu(mesh: DeviceMesh, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    def call(input: Tensor, dim: int = -1) -> Any:
        if not isinstance(input, DTensor) or split_of(input) != (dim % input.ndim, 2):
            return NotImplemented
        return packed.take(input, 0, 1) * packed.take(input, 1, 1).sigmoid()

    return call(*args, **kwargs)


def _apart(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for packed tensors only; where it does not apply they are put together."""

    def call(mesh: DeviceMesh, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not isinstance(args[0], DTensor) or not is_packed(args[0]):
            return NotImplemented
        result = rule(*args, **kwargs)
        return NotImplemented if result is None else result

    return call


def _view(x: DTensor, *shape: Any) -> DTensor | None:
    if len(shape) == 1 and isinstance(shape[0], Sequence):
        shape = tuple(shape[0])
    if any(not isinstance(size, int) for size in shape):
        return None  # a change of dtype
    return packed.view(x, shape)


def _unflatten(x: DTensor, dim: int, sizes: Sequence[int]) -> DTensor | None:
    dim = dim % x.ndim
    return packed.view(x, (*x.shape[:dim], *sizes, *x.shape[dim + 1 :]))


_SPLIT, _CHUNK, _VIEW = _apart(packed.split), _apart(packed.chunk), _apart(_view)
_SPECIAL: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head,
    F.cross_entropy: _cross_entropy,
    **dict.fromkeys((F.dropout, F.alpha_dropout, F.feature_alpha_dropout), _dropout),
    **dict.fromkeys(
        (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm), _matmul
    ),
    torch.einsum: _einsum,
    F.glu: _glu,
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _cat),
    **dict.fromkeys((torch.split, Tensor.split, Tensor.split_with_sizes), _SPLIT),
    **dict.fromkeys((torch.chunk, Tensor.chunk), _CHUNK),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _VIEW),
    **dict.fromkeys((Tensor.unflatten, torch.unflatten), _apart(_unflatten)),
    Tensor.__getitem__: _apart(packed.item),
}
# Told the mesh of the ranks, whatever their arguments are spread over.
_MIXES_MESHES = {F.scaled_dot_product_attention}
_CASTS = (Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type)
# DTensor answers these from one rank's part of a sum or of an uneven tensor (torch 2.13).
_LOOKS_AT_VALUES = {
    *(torch.any, Tensor.any, torch.all, Tensor.all),
    *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__),
    *(Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__complex__, Tensor.__index__),
    *(Tensor.__format__, Tensor.__contains__, Tensor.is_nonzero),
    *(torch.equal, Tensor.equal, torch.allclose, Tensor.allclose),
}
_COPIES = (Tensor.contiguous, Tensor.clone, torch.clone, Tensor.detach)
_PER_ELEMENT = {*_CASTS, *_COPIES, Tensor.clamp, torch.clamp}
# What may be done to split logits before their loss is taken: shifting, flattening, casting,
# scaling. All else, which may be anything a user's loss or metric does, sees them whole.
_KEEPS_CLASSES = {
    *_CASTS,
    *_COPIES,
    *(Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten),
    *(Tensor.__getitem__, Tensor.transpose, torch.transpose, Tensor.permute, torch.permute),
    *(Tensor.squeeze, Tensor.unsqueeze, Tensor.narrow, torch.narrow),
    *(Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__truediv__, Tensor.div, torch.div),
    *(torch.tanh, Tensor.tanh, Tensor.requires_grad_),
}
